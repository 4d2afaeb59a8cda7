//! A scheduler's session with a [`Peer`].

use std::time::Duration;

use connector_shim::scheduler::{LoadWait, SchedulerClient, SchedulerSetup, SessionConfig};

use super::{Peer, Served, session};

pub(crate) fn options(peer: &Peer) -> SchedulerSetup {
    SchedulerSetup {
        socket: peer.socket(),
        engine: "engine".into(),
        world_size: 1,
        run: [7; 16],
        config: SessionConfig {
            budget: Duration::from_millis(2),
            by_engine: false,
            early: false,
            part_blocks: 0,
            whole_blocks: 0,
            last: false,
            streams: false,
            load_wait: LoadWait::default(),
        },
        miss_wait_ms: None,
        handover_wait_ms: None,
        promise_wait_ms: None,
        groups: None,
    }
}

pub(crate) fn connected(peer: &Peer, block_bytes: u64) -> (SchedulerClient, Served) {
    connected_with(peer, block_bytes, |_| ())
}

/// A scheduler with a connection to a scripted sidecar, after `change` to the configuration of [`options`].
pub(crate) fn connected_with(
    peer: &Peer,
    block_bytes: u64,
    change: impl Fn(&mut SessionConfig),
) -> (SchedulerClient, Served) {
    session(|| {
        let mut options = options(peer);
        change(&mut options.config);
        let served = peer.serve(block_bytes);
        let scheduler = SchedulerClient::new(options).unwrap();
        match scheduler.is_connected() {
            true => Ok((scheduler, served.join().unwrap())),
            false => Err(format!("{:?}", scheduler.take_notices())),
        }
    })
}
