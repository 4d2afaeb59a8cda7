//! The engines of one role, what each has to do, and which of them is next.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::Uri;
use hyper::http::uri::{Authority, Scheme};
use tokio::time::Instant;

/// An engine that could not be reached, or did not answer, is tried again after this, by one request; after each trial in vain it is left
/// alone for twice as long, up to the longest.
const DOWN: Duration = Duration::from_secs(5);
const DOWN_MAX: Duration = Duration::from_secs(30);
/// The engine that a prompt's beginning names is passed over once it has this much more to do than the average.
const LOAD_OVER_AVERAGE: f64 = 1.25;
/// An engine may be replaced between two requests, and nobody sees it down: a length is asked for again after this.
const LENGTH_AGE_MAX: Duration = Duration::from_secs(60);

/// Where an engine's OpenAI server listens: `http://HOST:PORT`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Address(Authority);

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) address: Address,
    /// What it was given and has not ended: tokens of prompts, or requests.
    load: AtomicU64,
    /// How many of its last prompts in a row were late.
    late: AtomicU32,
    down: Mutex<Option<Down>>,
    length: Mutex<Length>,
    /// When it last gave a sign of life to a request that waits. All that wait for it share a look.
    pub(super) seen: tokio::sync::Mutex<Option<Instant>>,
}

/// How long an engine is left alone.
#[derive(Copy, Clone, Debug)]
struct Down {
    until: Instant,
    pause: Duration,
    /// Whether a request tries it, of which nothing is known yet.
    tried: bool,
}

/// What is known of how many tokens a prompt and its answer may have.
#[derive(Copy, Clone, Debug, Default)]
struct Length {
    /// Said since the engine was last down, and when: it may come back with another one.
    said: Option<(u64, Instant)>,
    /// Whether a question had no answer since one had.
    is_missed: bool,
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
        Arc::new(Self {
            address,
            load: AtomicU64::new(0),
            late: AtomicU32::new(0),
            down: Mutex::default(),
            length: Mutex::default(),
            seen: Default::default(),
        })
    }

    fn down(&self) -> MutexGuard<'_, Option<Down>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn length_known(&self) -> MutexGuard<'_, Length> {
        self.length.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many tokens a prompt and its answer may have; `None` where the engine has not said it since it was last down.
    pub(super) fn length(&self) -> Option<u64> {
        self.length_known().said.map(|(length, _)| length)
    }

    pub(super) fn set_length(&self, length: u64, now: Instant) {
        *self.length_known() = Length { said: Some((length, now)), is_missed: false };
    }

    /// Whether it is to be asked for its length.
    fn is_length_due(&self, now: Instant) -> bool {
        self.length_known().said.is_none_or(|(_, at)| now >= at + LENGTH_AGE_MAX)
    }

    /// A question for its length had no answer; whether that is the first one while its length is not known. What it said before stays:
    /// the question has a client's token, which may be wrong.
    pub(super) fn is_length_missed_first(&self) -> bool {
        let mut length = self.length_known();
        length.said.is_none() && !std::mem::replace(&mut length.is_missed, true)
    }

    /// It could not be reached, or did not answer.
    pub(super) fn set_down(&self, now: Instant) {
        self.length_known().said = None;
        let mut down = self.down();
        let pause = match *down {
            None => DOWN,
            Some(Down { pause, tried: true, .. }) => (pause * 2).min(DOWN_MAX),
            Some(Down { pause, tried: false, .. }) => pause,
        };
        *down = Some(Down { until: now + pause, pause, tried: false });
    }

    /// One more of its prompts was late; whether it is the first in a row. After a second one an engine is left alone though its server
    /// is up: what computes may hang.
    pub(super) fn is_late_once(&self) -> bool {
        self.late.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Whether it may be up as far as its prompts tell.
    pub(super) fn may_be_up(&self) -> bool {
        self.late.load(Ordering::Relaxed) <= 1
    }

    /// It has answered a prompt.
    pub(super) fn was_in_time(&self) {
        self.late.store(0, Ordering::Relaxed);
        self.set_up();
    }

    /// It has answered: what was before is forgotten.
    pub(super) fn set_up(&self) {
        if self.down().take().is_some() {
            self.length_known().is_missed = false;
        }
    }

    pub(super) fn is_up(&self, now: Instant) -> bool {
        self.down().is_none_or(|down| down.until <= now)
    }

    /// Counts so much to its load until the seat is dropped, for a request that is sent to it at once. After a pause that request is a
    /// trial: the engine is left alone for as long again, unless it answers.
    pub(super) fn seat(self: &Arc<Self>, weight: u64, now: Instant) -> Seat {
        if let Some(down) = self.down().as_mut().filter(|down| down.until <= now) {
            (down.until, down.tried) = (now + down.pause, true);
        }
        self.load.fetch_add(weight, Ordering::Relaxed);
        Seat { engine: Arc::clone(self), weight }
    }
}

// === impl Seat ===

impl Seat {
    /// Whether its request is all that its engine has to do, and no trial: an engine that is tried may not be there.
    pub(super) fn is_alone(&self, now: Instant) -> bool {
        self.engine.load.load(Ordering::Relaxed) == self.weight && self.engine.is_up(now)
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

    /// How many tokens a prompt and its answer may have at each of those that are up; `None` while one of them has not said it.
    pub(super) fn length_max(&self, now: Instant) -> Option<u64> {
        let up = self.0.iter().filter(|engine| engine.is_up(now));
        up.map(|engine| engine.length()).collect::<Option<Vec<_>>>()?.into_iter().min()
    }

    /// Those that are up and have not said their length lately.
    pub(super) fn lengths_due(&self, now: Instant) -> Vec<Arc<Engine>> {
        let due = |engine: &&Arc<Engine>| engine.is_up(now) && engine.is_length_due(now);
        self.0.iter().filter(due).map(Arc::clone).collect()
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
    /// One that is `spared` is behind every other that is as much up.
    pub(super) fn ranked(&self, start: u64, spared: Option<&Engine>, now: Instant) -> Vec<Arc<Engine>> {
        let load = |engine: &Engine| engine.load.load(Ordering::Relaxed);
        let up = self.up(now).max(1);
        let all: u64 = self.0.iter().map(|engine| load(engine)).sum();
        let most = ((all + 1) as f64 / up as f64 * LOAD_OVER_AVERAGE).ceil() as u64;
        let mut ranked: Vec<_> = self.0.iter().map(Arc::clone).collect();
        ranked.sort_by_key(|engine| {
            let mut hasher = DefaultHasher::new();
            (start, engine.address.authority()).hash(&mut hasher);
            let is_spared = spared.is_some_and(|spared| spared.address == engine.address);
            (!engine.is_up(now), is_spared, load(engine) + 1 > most, hasher.finish())
        });
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
        let first = engines.idlest(now).expect("one").seat(10, now);
        let second = engines.idlest(now).expect("one").seat(5, now);
        assert_ne!(first.engine.address, second.engine.address);
        assert_eq!(engines.idlest(now).expect("one").address, second.engine.address);
        second.engine.set_down(now);
        assert_eq!(engines.idlest(now).expect("one").address, first.engine.address);
        first.engine.set_down(now);
        assert!(engines.idlest(now).is_none());
        assert!(engines.idlest(now + DOWN).is_some(), "both are asked again");
    }

    #[test]
    fn a_seat_is_alone_at_an_engine_that_is_up_and_has_nothing_else_to_do() {
        let (engines, now) = (engines(1), Instant::now());
        let first = engines.0[0].seat(10, now);
        assert!(first.is_alone(now));
        let second = engines.0[0].seat(5, now);
        assert!(!first.is_alone(now) && !second.is_alone(now));
        drop(first);
        assert!(second.is_alone(now));
        engines.0[0].set_down(now);
        drop(second);
        assert!(!engines.0[0].seat(5, now + DOWN).is_alone(now + DOWN), "a trial");
    }

    #[test]
    fn one_request_tries_an_engine_that_was_down_and_less_often_each_time() {
        let (engines, mut now) = (engines(2), Instant::now());
        let engine = engines.0[0].clone();
        // All that were under way there fail at once.
        (0..9).for_each(|_| engine.set_down(now));
        for pause in [5, 10, 20, 30, 30] {
            let pause = Duration::from_secs(pause);
            assert!(!engine.is_up(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(engine.is_up(now));
            let trial = engine.seat(1, now);
            assert!(!engine.is_up(now), "a second request passes it by");
            assert_eq!(engines.ranked(7, None, now)[1].address, engine.address);
            engine.set_down(now);
            drop(trial);
        }
        now += DOWN_MAX;
        let trial = engine.seat(1, now);
        assert!(engine.is_up(now + DOWN_MAX), "another one tries it where the first has heard nothing yet");
        drop(trial);
        engine.set_up();
        assert!(engine.is_up(now), "its answer ends that");
        engine.set_down(now);
        assert!(engine.is_up(now + DOWN), "and what was before");
    }

    #[test]
    fn a_length_is_that_of_each_engine_that_is_up_and_said_anew_after_it_was_down() {
        let (engines, now) = (engines(2), Instant::now());
        engines.0[0].set_length(10, now);
        assert_eq!(engines.length_max(now), None, "the other one has not said its own");
        engines.0[1].set_length(20, now);
        assert_eq!(engines.length_max(now), Some(10));
        engines.0[0].set_down(now);
        assert_eq!(engines.length_max(now), Some(20), "who is down is not waited for");
        engines.0[0].set_up();
        assert_eq!(engines.length_max(now), None, "it may have come back with another one");
        assert!(engines.0[0].is_length_missed_first() && !engines.0[0].is_length_missed_first());
        engines.0[0].set_length(5, now);
        assert_eq!(engines.length_max(now), Some(5));
        let later = now + LENGTH_AGE_MAX;
        assert!(engines.lengths_due(later - Duration::from_millis(1)).is_empty());
        assert_eq!(engines.lengths_due(later).len(), 2);
        assert_eq!(engines.length_max(later), Some(5), "it holds while the engine is asked again");
        assert!(!engines.0[0].is_length_missed_first(), "a client's token may be wrong");
        assert_eq!(engines.length_max(now), Some(5));
        engines.0[0].set_down(now);
        engines.0[0].set_up();
        assert!(engines.0[0].is_length_missed_first(), "it is named once more after it was down");
    }

    #[test]
    fn equal_beginnings_stay_together_until_their_engine_has_too_much() {
        let (engines, now) = (engines(4), Instant::now());
        let first = |start| engines.ranked(start, None, now)[0].clone();
        assert!(
            (0..100).map(first).any(|engine| engine.address != first(0).address),
            "beginnings are spread"
        );
        let favourite = first(7);
        let seats: Vec<_> = (0..8).map(|_| favourite.seat(1, now)).collect();
        assert_ne!(first(7).address, favourite.address, "it has all that there is to do");
        drop(seats);
        assert_eq!(first(7).address, favourite.address);
        favourite.set_down(now);
        assert_eq!(engines.ranked(7, None, now)[3].address, favourite.address, "who is down is asked last");
    }
}
