//! Names that stand for the addresses of many nodes, as that of a headless service in Kubernetes: resolved again and again.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use super::back_off::BackOff;
use super::shared::Shared;

/// Says which addresses a name has.
pub trait Resolve: Debug + Send + Sync {
    /// The addresses of a `host:port`. It may block: it is called on a thread that nothing else waits for.
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>>;
}

/// The system's resolver: /etc/hosts, DNS and what else nsswitch.conf names.
#[derive(Debug)]
pub struct System;

impl Resolve for System {
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        Ok(name.to_socket_addrs()?.collect())
    }
}

/// Keeps the endpoints of a listed name up to date. One that is an address by itself has that address for ever.
pub(super) async fn follow(shared: Arc<Shared>, name: String) {
    if let Ok(address) = name.parse() {
        return shared.resolved(&name, BTreeSet::from([address]));
    }
    let limits = shared.config.limits;
    let mut back_off = BackOff::new(&limits, shared.config.boot.0.get());
    let mut hurry = shared.hurry.subscribe();
    let mut is_unresolved = false;
    loop {
        hurry.mark_unchanged();
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
                let (pause, news) = back_off.after(Duration::ZERO, &why);
                if news {
                    shared.note(format!(
                        "--peer {name} cannot be resolved: {why}; its earlier addresses stay in use, and it is tried \
                         again. Pass a name that DNS or /etc/hosts of this host knows"
                    ));
                }
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A stranger may have an address that the name did not have yet.
            _ = hurry.changed() => {}
        }
    }
}

/// The addresses of a name that count. A node listens at one address, so of two families it is the one that this node's is of.
async fn resolve(shared: &Shared, name: &str) -> Result<BTreeSet<SocketAddr>, String> {
    let (resolver, name) = (Arc::clone(&shared.config.resolver), name.to_owned());
    let resolved = tokio::task::spawn_blocking(move || resolver.resolve(&name)).await;
    let all = resolved.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let (same, other): (BTreeSet<_>, BTreeSet<_>) =
        all.into_iter().partition(|address| address.is_ipv4() == shared.config.listen.is_ipv4());
    [same, other]
        .into_iter()
        .find(|addresses| !addresses.is_empty())
        .ok_or_else(|| "it has no address".into())
}
