//! The cost of one node's control in a mesh of 1,000: one node in a process of its own, and in another 999
//! nodes, all followed by the node and following it, over mutual TLS. Each keeps 62,500 blocks, as many as
//! are announced of 1,000,000 at one in 16, and has 125 changes a second: the node sends 125,000 in a second
//! and receives as many. The last line is JSON.
//!
//! `FOLLOWERS=99 SECONDS=5` measures less. On few cores the other nodes take processor time from the node:
//! the share of a core is then for fewer messages, and the line has their number too.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

#[path = "../tests/rig/certificates.rs"]
#[expect(dead_code, reason = "tests replace files")]
mod certificates;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use certificates::{Authority, Folder, NAME};
use mesh::control::{Control, ControlConfig, DataAddresses, MemberEvent, Members};
use mesh::digest::{Digest, DigestChange};
use mesh::directory::{self, Directory};
use mesh::tls::{Security, Tls};
use mesh::transport::{BootId, NodeId, PeerNumber};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shm_protocol::random::mix_bits;

const FOLLOWERS: u64 = 999;
const SECONDS: u64 = 20;
const KEYS: u64 = 62_500;
const CHANGES_PER_SECOND: u64 = 125;
/// Set for the process of the one node: the folder of its certificate.
const NODE: &str = "MESH_CONTROL_NODE";
const LOOPBACK: &str = "127.0.0.1:0";

/// Messages of changes, and the changes in them.
#[derive(Debug, Default)]
struct ChangeTotals {
    messages: AtomicU64,
    changes: AtomicU64,
}

/// A publishing node: its control, and the number of its last change.
struct Publisher {
    control: Control,
    node: u64,
    next: u64,
}

// === impl ChangeTotals ===

impl ChangeTotals {
    fn count(&self, changes: &[DigestChange]) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.changes.fetch_add(changes.len() as u64, Ordering::Relaxed);
    }

    fn get(&self) -> [f64; 2] {
        [&self.messages, &self.changes].map(|count| count.load(Ordering::Relaxed) as f64)
    }
}

// === impl Publisher ===

impl Publisher {
    fn start(
        node: u64,
        listen: SocketAddr,
        (peers, folder): (Vec<String>, &Path),
        up: impl Fn(MemberEvent) + Send + Sync + 'static,
    ) -> Self {
        let file = |name: &str| folder.join(name);
        let (certificate, key, ca) = (file("tls.crt"), file("tls.key"), file("ca.crt"));
        let security = Security::Tls(Tls { certificate, key, ca, name: NAME.into() });
        let own = (NodeId::new(format!("n{node}")).expect("a name"), BootId(NonZeroU64::MIN));
        let data = DataAddresses { tcp: "127.0.0.1:9".parse().expect("an address"), rdma: None };
        let config = ControlConfig::new(own, listen, data, Members::Static(peers), security);
        let control = Control::start(config, up).expect("a control");
        control.publish((0..KEYS).map(|number| DigestChange::Added(digest(node, number))).collect(), false);
        Self { control, node, next: 0 }
    }

    /// Removes the oldest block, or adds a new one.
    fn change(&mut self) {
        let number = self.next / 2;
        let change = if self.next.is_multiple_of(2) {
            DigestChange::Removed(digest(self.node, number))
        } else {
            DigestChange::Added(digest(self.node, KEYS + number))
        };
        self.next += 1;
        self.control.publish(vec![change], false);
    }
}

fn digest(node: u64, number: u64) -> Digest {
    Digest(mix_bits(node << 40 | number))
}

fn given(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

/// Changes the blocks of each publisher at its rate, forever.
fn publish(mut publishers: Vec<Publisher>) {
    let began = Instant::now();
    let rate = (publishers.len() as u64 * CHANGES_PER_SECOND) as f64;
    let (mut done, count) = (0, publishers.len() as u64);
    loop {
        let due = (began.elapsed().as_secs_f64() * rate) as u64;
        while done < due {
            publishers[(done % count) as usize].change();
            done += 1;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

// === the one node ===

/// CPU seconds of the control's thread so far, by the scheduler's own clock: some machines do not count
/// ticks.
fn control_cpu_s() -> f64 {
    let mut tasks =
        std::fs::read_dir("/proc/self/task").expect("threads").filter_map(|task| Some(task.ok()?.path()));
    let is_control = |task: &PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "mesh-control")
    };
    let stat =
        std::fs::read_to_string(tasks.find(is_control).expect("the control's thread").join("schedstat"));
    let nanoseconds = stat.expect("schedstat").split_whitespace().next().expect("fields").parse::<f64>();
    nanoseconds.expect("nanoseconds") / 1e9
}

fn resident_mb() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: f64 = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
    pages * 4096.0 / 1e6
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("a folder of proc").count()
}

/// Applies events as the data thread does.
fn keep(news: &Receiver<MemberEvent>, followed: &AtomicU64) {
    let mut directory = Directory::new(directory::DirectoryConfig::default());
    for news in news {
        match news {
            MemberEvent::Joined { number, .. } => directory.add_peer(number),
            MemberEvent::Snapshot { number, filter, .. } => {
                directory.replace(number, filter);
                followed.fetch_add(1, Ordering::Relaxed);
            }
            MemberEvent::Changes { number, changes, .. } => drop(directory.apply(number, &changes)),
            MemberEvent::Promises { number, promises, .. } => {
                _ = directory.replace_promises(number, promises)
            }
            MemberEvent::Greeted { .. } | MemberEvent::Leaving { .. } | MemberEvent::Listed { .. } => {}
            MemberEvent::Left { number, why } => panic!("{number:?} left: {why}"),
            MemberEvent::Stale { number: PeerNumber(number) } => eprintln!("nothing is heard of {number}"),
            MemberEvent::Note(text) => eprintln!("{text}"),
        }
    }
}

/// Its standard input has its address, then all peers' addresses, then the time to measure.
fn node(folder: &Path) {
    let mut lines = std::io::stdin().lines().map(|line| line.expect("a line"));
    let mut line = || lines.next().expect("another line");
    let listen = line().parse().expect("an address");
    let peers: Vec<String> = line().split(' ').map(str::to_owned).collect();
    let (count, heard, followed) =
        (peers.len() as u64, Arc::<ChangeTotals>::default(), Arc::<AtomicU64>::default());
    let (sender, receiver) = channel();
    let up = {
        let heard = Arc::clone(&heard);
        move |news| {
            if let MemberEvent::Changes { changes, .. } = &news {
                heard.count(changes);
            }
            let _ = sender.send(news);
        }
    };
    let own = Publisher::start(0, listen, (peers, folder), up);
    {
        let followed = Arc::clone(&followed);
        std::thread::spawn(move || keep(&receiver, &followed));
    }
    while followed.load(Ordering::Relaxed) < count {
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::spawn(move || publish(vec![own]));
    println!("whole");
    let seconds: u64 = line().parse().expect("seconds");
    let (began, cpu_s, before) = (Instant::now(), control_cpu_s(), heard.get());
    std::thread::sleep(Duration::from_secs(seconds));
    let (wall_s, cpu_s) = (began.elapsed().as_secs_f64(), control_cpu_s() - cpu_s);
    let after = heard.get();
    let [messages, changes] = [0, 1].map(|at| (after[at] - before[at]) / wall_s);
    println!(
        "{cpu_s} {wall_s} {messages} {changes} {} {} {}",
        resident_mb(),
        entries("/proc/self/task"),
        entries("/proc/self/fd")
    );
    let _ = lines.next();
}

fn start_node(folder: &Path, listen: SocketAddr, peers: &[String]) -> Child {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program);
    let child = child.env(NODE, folder).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("the node's process");
    let input = child.stdin.as_mut().expect("piped");
    writeln!(input, "{listen}\n{}", peers.join(" ")).expect("it reads");
    child
}

fn main() {
    // Each node has a few descriptors.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("the limit of open files");
    if let Some(folder) = std::env::var_os(NODE) {
        return node(Path::new(&folder));
    }
    let (followers, seconds) = (given("FOLLOWERS", FOLLOWERS), given("SECONDS", SECONDS));
    let ca = Authority::new();
    let folder = Folder::with(&ca, &ca, NAME, 2099);
    let free = TcpListener::bind(LOOPBACK).and_then(|listener| listener.local_addr()).expect("a port");
    let (told, whole) = (Arc::<ChangeTotals>::default(), Arc::<AtomicU64>::default());
    let others: Vec<Publisher> = (1..=followers)
        .map(|number| {
            let (told, whole) = (Arc::clone(&told), Arc::clone(&whole));
            let up = move |news| match news {
                MemberEvent::Changes { changes, .. } => told.count(&changes),
                MemberEvent::Snapshot { .. } => drop(whole.fetch_add(1, Ordering::Relaxed)),
                _ => {}
            };
            let listen = LOOPBACK.parse().expect("an address");
            Publisher::start(number, listen, (vec![free.to_string()], &folder.0), up)
        })
        .collect();
    let peers: Vec<String> =
        others.iter().map(|other| other.control.listen_address().expect("a member").to_string()).collect();
    let began = Instant::now();
    let mut child = start_node(&folder.0, free, &peers);
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().expect("the node lives").expect("a line");
    assert_eq!(line(), "whole");
    while whole.load(Ordering::Relaxed) < followers {
        std::thread::sleep(Duration::from_millis(100));
    }
    let joined_s = began.elapsed().as_secs_f64();
    std::thread::spawn(move || publish(others));
    std::thread::sleep(Duration::from_secs(2));
    let input = child.stdin.as_mut().expect("piped");
    let (began, before) = (Instant::now(), told.get());
    writeln!(input, "{seconds}").expect("it reads");
    let figures: Vec<f64> = line().split(' ').map(|figure| figure.parse().expect("a figure")).collect();
    let (wall_s, after) = (began.elapsed().as_secs_f64(), told.get());
    let [messages, changes] = [0, 1].map(|at| (after[at] - before[at]) / wall_s);
    let [cpu_s, node_s, heard_messages, heard_changes, resident_mb, threads, descriptors] = figures[..]
    else {
        panic!("{figures:?}")
    };
    let core = cpu_s / node_s;
    println!(
        "{{\"followers\":{followers},\"joined_s\":{joined_s:.1},\"core_share\":{core:.3},\
         \"told_changes_per_s\":{changes:.0},\"told_messages_per_s\":{messages:.0},\
         \"heard_changes_per_s\":{heard_changes:.0},\"heard_messages_per_s\":{heard_messages:.0},\
         \"us_per_message\":{:.2},\"resident_mb\":{resident_mb:.0},\"threads\":{threads},\"descriptors\":{descriptors}}}",
        core * 1e6 / (messages + heard_messages),
    );
    let _ = child.kill();
    let _ = child.wait();
    // The process does not wait for the threads of the other nodes.
    drop(folder);
    std::process::exit(0);
}
