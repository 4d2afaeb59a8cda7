//! The Rust half of `benches/run mesh-tcp` and `mesh-rdma`: a node that serves a pool of blocks, or one that fetches them.
//!
//! `mesh_blocks certificates FOLDER` makes what TLS needs. `mesh_blocks serve BLOCKS BLOCK_BYTES STREAMS [FOLDER]` prints its
//! address and serves until its standard input ends; STREAMS of TCP, or `NIC:QUEUE_PAIRS` of RDMA. `mesh_blocks fetch
//! ADDRESS ...the same` takes a line at a time: `all` fetches every block and prints seconds, `one COUNT` fetches single
//! blocks and prints the microseconds of each.

#![expect(clippy::print_stdout, reason = "it reports")]
#![expect(clippy::disallowed_methods, reason = "it measures")]

use std::collections::HashMap;
use std::io::BufRead;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use mesh::transport::tcp::{Config, Security, Tcp, Tls};
use mesh::transport::{BootId, Done, Fetch, Grant, Granted, Label, NodeId, Peer, PeerNumber, Transport, Up};
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{Geometry, SlotRef};
use tiers::Blocks;
use tiers::pool::Pool;

const SEGMENT_BYTES: u64 = 256 << 20;
const NAMESPACE: NamespaceDigest = NamespaceDigest([7; 16]);
const DEADLINE: Duration = Duration::from_secs(60);
const PEER: PeerNumber = PeerNumber(1);
/// The name in the certificates.
const NAME: &str = "pillion.mesh";

/// What both sides are told.
struct Sizes {
    blocks: u32,
    block_bytes: u32,
    /// Streams, or a NIC and its queue pairs.
    over: String,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["certificates", folder] => certificates(Path::new(folder)),
        ["serve", ref rest @ ..] => serve(&sizes(rest), security(rest)),
        ["fetch", address, ref rest @ ..] => {
            fetch(address.parse().expect("an address"), &sizes(rest), security(rest));
        }
        _ => panic!("certificates FOLDER, or serve or fetch: see the source"),
    }
}

fn sizes(words: &[&str]) -> Sizes {
    let number = |at: usize| words[at].parse().expect("a number");
    Sizes { blocks: number(0), block_bytes: number(1), over: words[2].into() }
}

fn security(words: &[&str]) -> Security {
    let Some(folder) = words.get(3) else { return Security::Plaintext };
    let file = |name: &str| Path::new(folder).join(name);
    Security::Tls(Tls {
        certificate: file("tls.crt"),
        key: file("tls.key"),
        ca: file("ca.crt"),
        name: NAME.into(),
    })
}

/// A pool with all its blocks, and where they lie.
fn pool(sizes: &Sizes) -> (Blocks, Vec<(Label, SlotRef)>) {
    let geometry = Geometry::new(SEGMENT_BYTES, sizes.block_bytes.into()).expect("a block that fits");
    let segments = u64::from(sizes.blocks.div_ceil(geometry.slot_count));
    let config = tiers::pool::Config {
        bytes: SEGMENT_BYTES * segments,
        segment_bytes: SEGMENT_BYTES,
        path: None,
        hugepages: false,
        epoch: 1,
    };
    let pool = Pool::create(&config).expect("memory");
    while pool.reserving() {
        pool.reserve_some().expect("memory");
    }
    assert!((0..segments).all(|segment| pool.write_segment_header(segment, sizes.block_bytes.into())));
    let blocks = Blocks::new(pool.shared_region());
    let mut bytes = vec![0; sizes.block_bytes as usize];
    let places = (0..sizes.blocks).map(|number| {
        let (segment, index) = (number / geometry.slot_count, number % geometry.slot_count);
        let offset = geometry.offset(segment.into(), index).expect("counted");
        let slot = SlotRef { offset, generation: pool.first_generation() + u64::from(number) };
        let hash = BlockHash::from_words([number.into(), 1, 2, 3]);
        let key = BlockKey { namespace: 0, group: 0, hash };
        assert!(pool.fill(slot, NAMESPACE, &key));
        for (word, at) in bytes.chunks_mut(8).zip(0u64..) {
            let value = (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ u64::from(number));
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
        assert!(blocks.fill(offset, &bytes));
        (Label { namespace: NAMESPACE, group: 0, hash, bytes: sizes.block_bytes }, slot)
    });
    let places = places.collect();
    (blocks, places)
}

/// A transport, where it serves, and what it tells.
type Started = (Arc<dyn Transport>, SocketAddr, Receiver<Up>);

fn start(node: &str, sizes: &Sizes, security: Security, blocks: Blocks) -> Started {
    let (sender, ups) = channel();
    let (node, boot) = (NodeId::new(node).expect("a name"), BootId(NonZeroU64::MIN));
    let up = move |up| drop(sender.send(up));
    if let Some((nic, queue_pairs)) = sizes.over.split_once(':') {
        let (rdma, address) = over_rdma(node, boot, nic, queue_pairs, security, blocks, up);
        return (rdma, address, ups);
    }
    let streams = sizes.over.parse().expect("a number");
    let config = Config { streams, ..Config::new(node, boot, security) };
    let tcp = Tcp::start(config, blocks, up).expect("it starts");
    let address = tcp.address();
    (Arc::new(tcp), address, ups)
}

#[cfg(feature = "rdma")]
fn over_rdma(
    node: NodeId,
    boot: BootId,
    nic: &str,
    queue_pairs: &str,
    security: Security,
    blocks: Blocks,
    up: impl Fn(Up) + Send + Sync + 'static,
) -> (Arc<dyn Transport>, SocketAddr) {
    use mesh::transport::rdma::{Config, Rdma};
    use mesh::transport::tcp::Limits;
    let qps_per_peer = queue_pairs.parse().expect("a number");
    // An emulated NIC may take long.
    let limits = Limits { first_byte: DEADLINE, progress: DEADLINE, ..Limits::default() };
    let config = Config {
        qps_per_peer,
        lease: DEADLINE,
        limits,
        ..Config::new(node, boot, vec![nic.into()], security)
    };
    let rdma = Rdma::start(config, blocks, up).expect("it starts");
    while !rdma.ready() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let address = rdma.address();
    (Arc::new(rdma), address)
}

#[cfg(not(feature = "rdma"))]
fn over_rdma(
    _: NodeId,
    _: BootId,
    nic: &str,
    _: &str,
    _: Security,
    _: Blocks,
    _: impl Fn(Up) + Send + Sync + 'static,
) -> (Arc<dyn Transport>, SocketAddr) {
    panic!("built without the feature rdma, which {nic} needs")
}

fn peer(node: &str, address: SocketAddr) -> Peer {
    Peer { node: NodeId::new(node).expect("a name"), boot: Some(BootId(NonZeroU64::MIN)), address }
}

fn serve(sizes: &Sizes, security: Security) {
    let (blocks, places) = pool(sizes);
    let mut kept: HashMap<Label, Grant> =
        places.into_iter().map(|(label, slot)| (label, Grant { slot, checksum: None })).collect();
    let (transport, address, ups) = start("owner", sizes, security, blocks);
    transport.join(PEER, peer("reader", address));
    println!("{address}");
    // What decides, on a thread of its own as in a sidecar.
    std::thread::spawn(move || {
        for up in ups {
            match up {
                Up::Asked { ask, blocks, .. } => {
                    let slots = blocks.iter().map(|label| kept.get(label).copied()).collect();
                    transport.grant(Granted { ask, slots });
                }
                Up::Checksum { slot, checksum } => {
                    let granted = kept.values_mut().find(|grant| grant.slot == slot);
                    granted.expect("a slot of ours").checksum = Some(checksum);
                }
                _ => {}
            }
        }
    });
    std::io::stdin().lines().for_each(drop);
}

fn fetch(address: SocketAddr, sizes: &Sizes, security: Security) {
    let (blocks, places) = pool(sizes);
    let places: Vec<_> = places.into_iter().map(|(label, slot)| (label, slot.offset)).collect();
    // What arrives is not what lies there already.
    for (label, offset) in &places {
        assert!(blocks.fill(*offset, &vec![0; label.bytes as usize]));
    }
    let (transport, _, ups) = start("reader", sizes, security, blocks);
    transport.join(PEER, peer("owner", address));
    let mut ticket = 0;
    let mut get = |blocks: &[(Label, u64)]| {
        ticket += 1;
        let began = Instant::now();
        transport.post(Fetch { ticket, peer: PEER, blocks: blocks.to_vec(), deadline: DEADLINE });
        for _ in blocks {
            let done = loop {
                if let Up::Done(done) = ups.recv().expect("an end for each block") {
                    break done;
                }
            };
            assert!(matches!(done, Done { result: Ok(_), .. }), "{done:?}");
        }
        began.elapsed()
    };
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a command");
        match line.split_once(' ') {
            None => println!("{}", get(&places).as_secs_f64()),
            Some((_, count)) => {
                let count: usize = count.parse().expect("a number");
                let blocks = places.iter().cycle().take(count);
                let micros = blocks.map(|block| format!("{:.1}", get(&[*block]).as_secs_f64() * 1e6));
                println!("{}", micros.collect::<Vec<_>>().join(" "));
            }
        }
    }
}

/// A CA, and one certificate for both nodes.
fn certificates(folder: &Path) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a certificate");
    let issuer = rcgen::Issuer::new(params, key);
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new([NAME.to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    let files = [("ca.crt", ca.pem()), ("tls.crt", certificate.pem()), ("tls.key", key.serialize_pem())];
    files.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).expect("a folder"));
}
