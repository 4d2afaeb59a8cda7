//! The engines of one role, what each has to do, and which of them is next.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::Uri;
use hyper::http::uri::{Authority, Scheme};
use tokio::time::Instant;

/// An engine that could not be reached is asked again after this.
const DOWN: Duration = Duration::from_secs(5);
/// The engine that a prompt's beginning names is passed over once it has this much more to do than the average.
const LOAD_OVER_AVERAGE: f64 = 1.25;

/// Where an engine's OpenAI server listens: `http://HOST:PORT`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Address(Authority);

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) address: Address,
    /// What it was given and has not ended: tokens of prompts, or requests.
    load: AtomicU64,
    down_until: Mutex<Option<Instant>>,
}

/// A share of an engine's load, given back on drop.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) engine: Arc<Engine>,
    weight: u64,
}

/// All engines of one role.
#[derive(Clone, Debug)]
pub(super) struct Engines(Vec<Arc<Engine>>);

// === impl Address ===

impl FromStr for Address {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("\"{text}\" is no engine's address; write http://HOST:PORT, of vLLM's own server");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let parts = uri.into_parts();
        let bare = parts.path_and_query.is_none_or(|path| path.as_str() == "/");
        match (parts.scheme, parts.authority) {
            (Some(scheme), Some(authority))
                if scheme == Scheme::HTTP && authority.port().is_some() && bare =>
            {
                Ok(Self(authority))
            }
            _ => Err(wrong()),
        }
    }
}

impl Address {
    /// The same request at this engine.
    pub(super) fn at(&self, path: &str) -> Result<Uri, hyper::http::Error> {
        Uri::builder().scheme(Scheme::HTTP).authority(self.0.clone()).path_and_query(path).build()
    }

    pub(super) fn authority(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

// === impl Engine ===

impl Engine {
    fn new(address: Address) -> Arc<Self> {
        Arc::new(Self { address, load: AtomicU64::new(0), down_until: Mutex::default() })
    }

    fn down_until(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.down_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It could not be reached, or did not answer.
    pub(super) fn set_down(&self, now: Instant) {
        *self.down_until() = Some(now + DOWN);
    }

    pub(super) fn is_up(&self, now: Instant) -> bool {
        self.down_until().is_none_or(|until| until <= now)
    }

    /// Counts so much to its load until the seat is dropped.
    pub(super) fn seat(self: &Arc<Self>, weight: u64) -> Seat {
        self.load.fetch_add(weight, Ordering::Relaxed);
        Seat { engine: Arc::clone(self), weight }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.engine.load.fetch_sub(self.weight, Ordering::Relaxed);
    }
}

// === impl Engines ===

impl Engines {
    pub(super) fn new(addresses: &[Address]) -> Self {
        Self(addresses.iter().cloned().map(Engine::new).collect())
    }

    pub(super) fn up(&self, now: Instant) -> usize {
        self.0.iter().filter(|engine| engine.is_up(now)).count()
    }

    /// The one with the least to do of those that are up.
    pub(super) fn idlest(&self, now: Instant) -> Option<Arc<Engine>> {
        let up = self.0.iter().filter(|engine| engine.is_up(now));
        up.min_by_key(|engine| engine.load.load(Ordering::Relaxed)).map(Arc::clone)
    }

    /// The engine with the least to do of those that are up, `spared` left out.
    pub(super) fn idlest_but(&self, spared: &Engine, now: Instant) -> Option<Arc<Engine>> {
        let others = self.0.iter().filter(|engine| engine.address != spared.address);
        Self(others.map(Arc::clone).collect()).idlest(now)
    }

    /// All of them, the best for a prompt that begins so first: those that are up and have not more than their share to do
    /// before the others, and each time in the order that the beginning gives, which changes little where an engine comes or goes.
    pub(super) fn ranked(&self, start: u64, now: Instant) -> Vec<Arc<Engine>> {
        let load = |engine: &Engine| engine.load.load(Ordering::Relaxed);
        let up = self.up(now).max(1);
        let all: u64 = self.0.iter().map(|engine| load(engine)).sum();
        let most = ((all + 1) as f64 / up as f64 * LOAD_OVER_AVERAGE).ceil() as u64;
        let mut ranked: Vec<_> = self.0.iter().map(Arc::clone).collect();
        ranked.sort_by_key(|engine| {
            let mut hasher = DefaultHasher::new();
            (start, engine.address.authority()).hash(&mut hasher);
            (!engine.is_up(now), load(engine) + 1 > most, hasher.finish())
        });
        ranked
    }

    /// As [`Engines::ranked`], with `spared` behind every other engine that is as much up as it.
    pub(super) fn ranked_but(&self, spared: &Engine, start: u64, now: Instant) -> Vec<Arc<Engine>> {
        let mut ranked = self.ranked(start, now);
        ranked.sort_by_key(|engine| (!engine.is_up(now), engine.address == spared.address));
        ranked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engines(count: u16) -> Engines {
        let addresses: Vec<Address> = (0..count)
            .map(|port| format!("http://engine:{}", 8000 + port).parse().expect("an address"))
            .collect();
        Engines::new(&addresses)
    }

    #[test]
    fn addresses() {
        for right in ["http://a:1", "http://a:1/", "http://[::1]:80"] {
            right.parse::<Address>().expect(right);
        }
        for wrong in ["a:1", "https://a:1", "http://a", "http://a:1/v1", ""] {
            wrong.parse::<Address>().expect_err(wrong);
        }
    }

    #[test]
    fn prompts_go_to_who_has_the_least_to_do() {
        let (engines, now) = (engines(2), Instant::now());
        let first = engines.idlest(now).expect("one").seat(10);
        let second = engines.idlest(now).expect("one").seat(5);
        assert_ne!(first.engine.address, second.engine.address);
        assert_eq!(engines.idlest(now).expect("one").address, second.engine.address);
        second.engine.set_down(now);
        assert_eq!(engines.idlest(now).expect("one").address, first.engine.address);
        first.engine.set_down(now);
        assert!(engines.idlest(now).is_none());
        assert!(engines.idlest(now + DOWN).is_some(), "both are asked again");
    }

    #[test]
    fn equal_beginnings_stay_together_until_their_engine_has_too_much() {
        let (engines, now) = (engines(4), Instant::now());
        let first = |start| engines.ranked(start, now)[0].clone();
        assert!(
            (0..100).map(first).any(|engine| engine.address != first(0).address),
            "beginnings are spread"
        );
        let favourite = first(7);
        let seats: Vec<_> = (0..8).map(|_| favourite.seat(1)).collect();
        assert_ne!(first(7).address, favourite.address, "it has all that there is to do");
        drop(seats);
        assert_eq!(first(7).address, favourite.address);
        favourite.set_down(now);
        assert_eq!(engines.ranked(7, now)[3].address, favourite.address, "who is down is asked last");
    }
}
