//! A peer in a process of its own, killed, restarted and frozen in the middle of a fetch.

mod rig;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mesh::transport::tcp::{Limits, Security};
use mesh::transport::{Fault, Label, Peer, PeerNumber, Refusal, Stage};
use rig::proxy::{Proxy, Trouble, Troubles};
use rig::{LONG, Node, Owner, boot, label, node, patient};
use rustix::process::{Pid, Signal, kill_process};

/// Printed by the owner before its address.
const SERVES: &str = "serves at ";

/// An owner in a process of its own. Killed at the end.
struct Process {
    child: Child,
    address: SocketAddr,
}

// === impl Process ===

impl Process {
    /// Starts this test's binary again, as the owner in this life.
    fn start(life: u64) -> Self {
        let name = format!("the_owner_in_life_{life}");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", "--nocapture", &name]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address =
            lines.map(Result::unwrap).find_map(|line| Some(line.split_once(SERVES)?.1.parse().unwrap()));
        Self { child, address: address.expect("an owner serves") }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn as_peer(&self, life: u64) -> Peer {
        Peer { node: node("other"), boot: Some(boot(life)), address: self.address }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A proxy in front of an owner that stretches all blocks to 12 s: a stop of the owner after the first block
/// falls into the middle.
fn slowly(owner: &Process) -> Proxy {
    Proxy::start(owner.address, Troubles::down(Trouble::Drip(0, 16 << 10, Duration::from_millis(1))))
}

fn labels() -> Vec<Label> {
    (0..400).map(|number| label(number, 500_000)).collect()
}

fn own(life: u64) {
    let other = Node::start("other", life, Security::Plaintext, patient(), Owner::Grants);
    labels().iter().for_each(|label| other.keep(*label, false));
    let one = Peer { node: node("one"), boot: None, address: other.address() };
    other.transport().join(PeerNumber(1), one);
    let mut out = std::io::stdout();
    writeln!(out, "{SERVES}{}", other.address()).unwrap();
    // It runs until it is killed, or until its own limit if the test was killed.
    std::thread::sleep(Duration::from_secs(300));
}

#[test]
#[ignore = "the other process of the tests below"]
fn the_owner_in_life_1() {
    own(1);
}

#[test]
#[ignore = "the other process of the tests below"]
fn the_owner_in_life_2() {
    own(2);
}

#[test]
fn a_peer_killed_in_the_middle_ends_what_it_owed_and_is_another_when_it_is_back() {
    let mut owner = Process::start(1);
    let mut one = Node::new("one", Security::Plaintext, patient());
    let proxy = slowly(&owner);
    one.transport().join(PeerNumber(1), Peer { address: proxy.address, ..owner.as_peer(1) });
    let labels = labels();
    let fetching = one.fetch(1, &labels, LONG);
    one.wait("the first", |seen| seen.done.keys().next().map(drop));
    owner.kill();
    let ends = one.ends(&fetching);
    assert!(ends.iter().all(|end| matches!(end, Ok(()) | Err(Fault::Short | Fault::Peer(_)))), "{ends:?}");
    assert!(ends.iter().any(Result::is_err), "it was killed in the middle");

    let owner = Process::start(2);
    one.transport().join(PeerNumber(1), Peer { boot: Some(boot(1)), ..owner.as_peer(2) });
    assert_eq!(one.get(1, &labels[..2], LONG), [Err(Fault::Refused(Refusal::OtherBoot)); 2]);
    one.transport().join(PeerNumber(1), owner.as_peer(2));
    assert!(one.get(1, &labels, LONG).iter().all(Result::is_ok));
    one.check_ends();
}

#[test]
fn a_peer_frozen_in_the_middle_is_waited_for_until_the_limit() {
    let owner = Process::start(1);
    let short = Duration::from_millis(500);
    // The kernel still accepts connections for it.
    let limits = Limits { handshake: short, first_byte: short, progress: short, ..patient() };
    let mut one = Node::new("one", Security::Plaintext, limits);
    let proxy = slowly(&owner);
    one.transport().join(PeerNumber(1), Peer { address: proxy.address, ..owner.as_peer(1) });
    let labels = labels();
    let fetching = one.fetch(1, &labels, LONG);
    one.wait("the first", |seen| seen.done.keys().next().map(drop));
    owner.signal(Signal::STOP);
    let ends = one.ends(&fetching);
    let late = |end: &Result<(), Fault>| {
        matches!(end, Err(Fault::Timeout(Stage::Progress | Stage::FirstByte | Stage::Handshake)))
    };
    assert!(ends.iter().all(|end| end.is_ok() || late(end)), "{ends:?}");
    assert!(ends.iter().any(late), "it was frozen in the middle");
    owner.signal(Signal::CONT);
    proxy.trouble(Troubles::default());
    while one.get(1, &labels[..4], LONG).iter().any(Result::is_err) {
        std::thread::sleep(patient().back_off_max);
    }
    one.check_ends();
}
