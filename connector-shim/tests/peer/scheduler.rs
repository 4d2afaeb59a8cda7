//! A scheduler's session with a [`Peer`].

use std::time::Duration;

use connector_shim::scheduler::{Config, LoadWait, Options, Scheduler};

use super::{Peer, Served, session};

pub(crate) fn options(peer: &Peer) -> Options {
    Options {
        socket: peer.socket(),
        engine: "engine".into(),
        world_size: 1,
        run: [7; 16],
        config: Config {
            budget: Duration::from_millis(2),
            by_engine: false,
            early: false,
            part_blocks: 0,
            whole_blocks: 0,
            last: false,
            load_wait: LoadWait::default(),
        },
        miss_wait_ms: None,
        handover_wait_ms: None,
        promise_wait_ms: None,
        groups: None,
    }
}

pub(crate) fn connected(peer: &Peer, block_bytes: u64) -> (Scheduler, Served) {
    connected_with(peer, block_bytes, |_| ())
}

/// A scheduler that is connected to a scripted sidecar, after `change` to the configuration of [`options`].
pub(crate) fn connected_with(
    peer: &Peer,
    block_bytes: u64,
    change: impl Fn(&mut Config),
) -> (Scheduler, Served) {
    session(|| {
        let mut options = options(peer);
        change(&mut options.config);
        let served = peer.serve(block_bytes);
        let scheduler = Scheduler::new(options).unwrap();
        match scheduler.connected() {
            true => Ok((scheduler, served.join().unwrap())),
            false => Err(format!("{:?}", scheduler.take_notices())),
        }
    })
}
