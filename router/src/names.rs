//! The addresses of engines with a name for a host, looked up again while the router runs.

use std::collections::{HashMap, HashSet};
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::address::{EngineAddress, EngineUrl};

/// The longest wait for name servers. The names of one list are looked up at once.
const LOOKUP_TIME_MAX: Duration = Duration::from_secs(5);

/// The known addresses of one list of engines.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<EngineUrl, Vec<SocketAddr>>,
    /// Names with a failed last lookup, each of them named in the log.
    failing: HashSet<EngineUrl>,
}

/// Looks a name up as the system does.
pub(super) async fn look_up(url: EngineUrl) -> Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((url.host(), url.port())).await?.collect())
}

/// Addresses in one order. A host with both families listens on both, or, as vLLM by default, on IPv4 alone: it is one engine.
fn of_one_family(mut found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    if found.iter().any(SocketAddr::is_ipv4) {
        found.retain(SocketAddr::is_ipv4);
    }
    found.sort_unstable();
    found.dedup();
    found
}

// === impl Names ===

impl Names {
    /// Looks up the names of a list by `look_up`. A failed lookup keeps the addresses of the last one.
    pub(super) async fn refresh_names<F>(&mut self, urls: &[&EngineUrl], look_up: impl Fn(EngineUrl) -> F)
    where
        F: Future<Output = Result<Vec<SocketAddr>>> + Send + 'static,
    {
        let names: HashSet<_> = urls.iter().copied().filter(|url| url.literal().is_none()).collect();
        self.known.retain(|url, _| names.contains(url));
        self.failing.retain(|url| names.contains(url));
        let mut lookups = JoinSet::new();
        for url in names {
            let (url, found) = (url.clone(), timeout(LOOKUP_TIME_MAX, look_up(url.clone())));
            lookups
                .spawn(async move { (url, found.await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))) });
        }
        while let Some(looked_up) = lookups.join_next().await {
            let (url, found) = looked_up.expect("no lookup panics");
            self.note_lookup(url, found.map(of_one_family));
        }
    }

    /// Notes the result of a lookup.
    fn note_lookup(&mut self, url: EngineUrl, found: Result<Vec<SocketAddr>>) {
        let found = found.and_then(|found| match found.is_empty() {
            true => Err(Error::other("it has no address")),
            false => Ok(found),
        });
        match found {
            Ok(found) => {
                if self.failing.remove(&url) {
                    tracing::info!(%url, "the host's name is resolved again");
                }
                self.known.insert(url, found);
            }
            Err(error) => {
                if self.failing.insert(url.clone()) {
                    let known = self.known.get(&url).map_or(0, Vec::len);
                    tracing::warn!(%url, %error, known, "the host's name was not resolved; engines known of it stay");
                }
            }
        }
    }

    /// The addresses of the engines of these URLs, in their order.
    pub(super) fn addresses(&self, urls: &[EngineUrl]) -> Vec<EngineAddress> {
        let of = |url: &EngineUrl| match url.literal() {
            Some(socket) => vec![socket],
            None => self.known.get(url).cloned().unwrap_or_default(),
        };
        urls.iter()
            .flat_map(|url| of(url).into_iter().map(|socket| EngineAddress::new(url.clone(), socket)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: [&str; 3] = ["http://10.9.9.9:1", "http://p:8000", "http://gone:8000"];

    /// The addresses after a refresh, if the lookup of `p` finds these. It fails without any.
    fn refreshed(names: &mut Names, found: &[&str]) -> Vec<String> {
        let urls = LISTED.map(|url| url.parse::<EngineUrl>().unwrap());
        let found: Vec<SocketAddr> = found.iter().map(|socket| socket.parse().unwrap()).collect();
        let look_up = |url: EngineUrl| {
            assert!(url.literal().is_none(), "{url}");
            let found = found.clone();
            async move {
                match url.host() {
                    "p" if !found.is_empty() => Ok(found),
                    _ => Err(Error::other("no such name")),
                }
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(names.refresh_names(&urls.each_ref(), look_up));
        names.addresses(&urls).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_address_of_a_name_is_an_engine_and_a_failed_lookup_changes_nothing() {
        let mut names = Names::default();
        let literal = "http://10.9.9.9:1".to_owned();
        assert_eq!(refreshed(&mut names, &[]), std::slice::from_ref(&literal));
        assert_eq!(names.failing.len(), 2);
        let two = refreshed(&mut names, &["10.0.0.2:8000", "10.0.0.1:8000", "10.0.0.2:8000"]);
        assert_eq!(two, [&literal, "http://p:8000 (10.0.0.1)", "http://p:8000 (10.0.0.2)"]);
        assert_eq!(refreshed(&mut names, &[]), two);
        let other = refreshed(&mut names, &["10.0.0.3:8000"]);
        assert_eq!(other, [&literal, "http://p:8000 (10.0.0.3)"]);
        assert_eq!(names.failing.len(), 1, "a name that was found again may fail again");
    }

    #[test]
    fn a_host_with_addresses_of_both_families_is_one_engine() {
        let found =
            |found: &[&str]| of_one_family(found.iter().map(|socket| socket.parse().unwrap()).collect());
        assert_eq!(found(&["[::1]:1", "127.0.0.1:1"]), ["127.0.0.1:1".parse().unwrap()]);
        assert_eq!(found(&["[::2]:1", "[::1]:1"]).len(), 2);
    }

    #[test]
    fn a_lookup_without_an_answer_is_a_failed_one() {
        let mut names = Names::default();
        let url: EngineUrl = "http://slow:1".parse().unwrap();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(names.refresh_names(&[&url], |_| std::future::pending()));
        assert!(names.failing.contains(&url) && names.known.is_empty());
    }
}
