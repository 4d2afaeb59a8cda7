//! Names with the addresses of many nodes, such as the name of a headless service in Kubernetes. They are
//! resolved again and again.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use super::back_off::BackOff;
use super::shared::ControlShared;

/// Resolves names to addresses.
pub trait Resolve: Debug + Send + Sync {
    /// Returns the addresses of a `host:port`. It may block: nothing else waits for its thread.
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>>;
}

/// The resolver of the system: /etc/hosts, DNS and other sources in nsswitch.conf.
#[derive(Debug)]
pub struct System;

impl Resolve for System {
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        Ok(name.to_socket_addrs()?.collect())
    }
}

/// Keeps the endpoints of a listed name up to date, forever. An IP address is its own only endpoint, and
/// needs no further resolution.
pub(super) async fn follow_name(shared: Arc<ControlShared>, name: String) {
    if let Ok(address) = name.parse() {
        return shared.resolved(&name, BTreeSet::from([address]));
    }
    let limits = shared.config.limits;
    let mut back_off = BackOff::new(&limits, shared.config.boot.0.get());
    let mut retry_now = shared.retry_now.subscribe();
    let mut is_unresolved = false;
    loop {
        retry_now.mark_unchanged();
        let resolved = resolve(&shared, &name).await;
        if is_unresolved != resolved.is_err() {
            is_unresolved = !is_unresolved;
            shared.count_unresolved(is_unresolved);
        }
        let pause = match resolved {
            Ok(addresses) => {
                shared.resolved(&name, addresses);
                back_off = BackOff::new(&limits, shared.config.boot.0.get());
                limits.resolve
            }
            Err(why) => {
                let (pause, is_new) = back_off.pause_after(Duration::ZERO, &why);
                if is_new {
                    shared.report_note(format!(
                        "--peer {name} cannot be resolved: {why}; its earlier addresses stay in use, and it is tried \
                         again. Pass a name that DNS or /etc/hosts of this host knows"
                    ));
                }
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // An unknown follower may have an address that is new for this name.
            _ = retry_now.changed() => {}
        }
    }
}

/// The usable addresses of a name. A node listens at one address, so of two families only the family of this
/// node's address is used, and by an observer IPv4.
async fn resolve(shared: &ControlShared, name: &str) -> Result<BTreeSet<SocketAddr>, String> {
    let (resolver, name) = (Arc::clone(&shared.config.resolver), name.to_owned());
    let resolved = tokio::task::spawn_blocking(move || resolver.resolve(&name)).await;
    let is_ipv4 = shared.config.served.as_ref().is_none_or(|served| served.listen.is_ipv4());
    let all = resolved.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let (same, other): (BTreeSet<_>, BTreeSet<_>) =
        all.into_iter().partition(|address| address.is_ipv4() == is_ipv4);
    [same, other]
        .into_iter()
        .find(|addresses| !addresses.is_empty())
        .ok_or_else(|| "it has no address".into())
}
