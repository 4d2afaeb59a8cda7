//! Names with many addresses: each address is followed, and nodes that come, go or move are found.

mod rig;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mesh::control::{ControlLimits, Members, Parting, Resolve, System};
use rig::crew::{Crew, Plan, added, address, patient};
use rig::proxy::{Proxy, Trouble, Troubles};
use rig::{WATCHDOG, now};

const PODS: &str = "pods:17311";

/// A resolver with addresses set by a test.
#[derive(Debug, Default)]
struct Names {
    known: Mutex<HashMap<String, Vec<SocketAddr>>>,
    asked: AtomicU32,
}

impl Names {
    fn of_pods(addresses: &[SocketAddr]) -> Arc<Self> {
        let names = Arc::new(Self::default());
        names.set(addresses);
        names
    }

    /// Sets the addresses of the name; an empty list is a failure.
    fn set(&self, addresses: &[SocketAddr]) {
        self.known.lock().unwrap().insert(PODS.into(), addresses.to_vec());
    }

    /// Waits until the node has used an answer from after this call.
    fn wait(&self) {
        let before = self.asked.load(Ordering::SeqCst);
        eventually("two more lookups", || self.asked.load(Ordering::SeqCst) >= before + 2);
    }

    fn plan(self: &Arc<Self>, name: &'static str, listen: SocketAddr) -> Plan {
        let resolver = Arc::clone(self) as Arc<dyn Resolve>;
        Plan { resolver, ..Plan::new(name, listen, Members::Static(vec![PODS.into()])) }
    }
}

impl Resolve for Names {
    fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        let found = self.known.lock().unwrap().get(name).cloned().unwrap_or_default();
        self.asked.fetch_add(1, Ordering::SeqCst);
        if found.is_empty() { Err(io::Error::other("no such name today")) } else { Ok(found) }
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = now() + WATCHDOG;
    while !holds() {
        assert!(now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn none_empty(node: &Crew) {
    eventually("a member at every endpoint", || node.control().endpoints_empty() == 0);
}

fn notes(node: &Crew, what: &str) -> usize {
    node.seen(|seen| seen.notes.iter().filter(|note| note.contains(what)).count())
}

#[test]
fn nodes_behind_one_name_find_each_other_and_one_that_comes_back_at_another_address() {
    let all = [address(), address(), address(), address()];
    let names = Names::of_pods(&all[..3]);
    let one = names.plan("one", all[0]).start();
    one.publish(added(0..10));
    let two = names.plan("two", all[1]).start();
    let mut three = names.plan("three", all[2]).start();
    three.publish(added(100..110));
    for node in [&one, &two, &three] {
        for other in ["one", "two", "three"].into_iter().filter(|other| *other != node.name.as_str()) {
            node.joined(other, 1);
        }
        none_empty(node);
    }
    let before = one.joined("three", 1);
    three.stop();
    one.wait("silence", |seen| (seen.members[&before].stale == 1).then_some(()));
    names.set(&[all[0], all[1], all[3]]);
    let three = Plan { life: 2, ..names.plan("three", all[3]) }.start();
    three.publish(added(200..210));
    for node in [&one, &two] {
        let after = node.joined("three", 2);
        node.keeps(after, 200..210, 100..110);
        none_empty(node);
        node.seen(|seen| assert_eq!((seen.members.len(), seen.left.len()), (2, 1)));
    }
    assert_eq!(one.left(before), Parting::Restarted);
    three.keeps(three.joined("one", 1), 0..10, 100..110);
    for node in [&one, &two, &three] {
        assert_eq!(
            notes(node, &node.control().listen_address().unwrap().to_string()),
            0,
            "nothing is said of itself"
        );
        assert_eq!(notes(node, "--node-id"), 0);
    }
}

#[test]
fn an_address_that_has_gone_from_its_name_is_followed_while_it_answers() {
    let all = [address(), address(), address()];
    let names = Names::of_pods(&all[..2]);
    let one = names.plan("one", all[0]).start();
    let mut two = names.plan("two", all[1]).start();
    let number = one.joined("two", 1);
    names.set(&[all[0], all[2]]);
    eventually("the new address", || one.control().endpoints_empty() == 1);
    two.publish(added(0..10));
    one.keeps(number, 0..10, 100..200);
    two.stop();
    let two = names.plan("two", all[2]).start();
    one.left(number);
    one.joined("two", 1);
    none_empty(&one);
    drop(two);
}

#[test]
fn a_name_that_cannot_be_resolved_is_told_of_and_tried_again() {
    let all = [address(), address()];
    let names = Names::of_pods(&[]);
    let one = names.plan("one", all[0]).start();
    one.noted("--peer pods:17311 cannot be resolved: no such name today");
    assert_eq!(one.control().names_unresolved(), 1);
    names.set(&all);
    let two = names.plan("two", all[1]).start();
    let number = one.joined("two", 1);
    assert_eq!(notes(&one, "cannot be resolved"), 1);
    assert_eq!(one.control().names_unresolved(), 0);
    // A new failure is noted again, and no member is removed for it.
    names.set(&[]);
    one.wait("a second note", |seen| {
        let told = seen.notes.iter().filter(|note| note.contains("cannot be resolved")).count();
        (told == 2).then_some(())
    });
    two.publish(added(0..10));
    one.keeps(number, 0..10, 100..200);
}

#[test]
fn an_address_without_a_member_is_told_of_once_until_it_has_one() {
    let all = [address(), address()];
    let names = Names::of_pods(&all);
    let limits = ControlLimits { gone: Duration::from_secs(3), ..patient() };
    let one = Plan { limits, ..names.plan("one", all[0]) }.start();
    let told = format!("{} (--peer {PODS}) has had no member", all[1]);
    one.noted(&told);
    assert_eq!(one.control().endpoints_empty(), 1);
    let _two = names.plan("two", all[1]).start();
    one.joined("two", 1);
    none_empty(&one);
    assert_eq!((notes(&one, "has had no member"), notes(&one, &told)), (1, 1), "and none of itself");
}

#[test]
fn a_node_that_answers_at_two_addresses_is_followed_at_one_and_found_at_the_other() {
    let all = [address(), address()];
    let two = Names::of_pods(&all[..1]).plan("two", all[1]).start();
    let proxy = Proxy::start(all[1], Troubles::default());
    let names = Names::of_pods(&[all[0], proxy.address]);
    let one = names.plan("one", all[0]).start();
    let before = one.joined("two", 1);
    names.set(&[all[0], proxy.address, all[1]]);
    names.wait();
    none_empty(&one);
    proxy.trouble(Troubles::down(Trouble::Cut(0)));
    proxy.cut();
    assert_eq!(one.left(before), Parting::Restarted);
    let after = one.joined("two", 1);
    two.publish(added(0..10));
    one.keeps(after, 0..10, 100..200);
    assert_eq!(notes(&one, "--node-id"), 0);
}

#[test]
fn the_systems_resolver_knows_this_host() {
    let listen = "127.0.0.1:0".parse().unwrap();
    let two = Plan::new("two", listen, Members::Static(Vec::new())).start();
    let localhost = format!("localhost:{}", two.control().listen_address().unwrap().port());
    let one =
        Plan { resolver: Arc::new(System), ..Plan::new("one", address(), Members::Static(vec![localhost])) };
    one.start().joined("two", 1);
    assert!(System.resolve("no-such-name.invalid:1").is_err());
}
