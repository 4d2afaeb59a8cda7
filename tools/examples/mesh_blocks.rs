//! The Rust half of `benches/run mesh-tcp` and `mesh-rdma`: a server of blocks, or a reader.
//!
//! `mesh_blocks certificates FOLDER` makes the files of TLS. `mesh_blocks serve BLOCKS BLOCK_BYTES STREAMS
//! [FOLDER]` prints its address and serves until its standard input ends; STREAMS of TCP, or
//! `NIC:QUEUE_PAIRS` of RDMA. `mesh_blocks fetch ADDRESS ...the same` takes a line at a time: `all` fetches
//! every block and prints seconds, `one COUNT` fetches single blocks and prints the microseconds of each.

#![expect(clippy::print_stdout, reason = "it reports")]

use std::io::BufRead;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use mesh::transport::rdma::{self, Rdma};
use mesh::transport::tcp::{self, Security, Tcp, TcpLimits, Tls};
use mesh::transport::{Transport, TransportEvent};
use tools::bench::node::{self, BOOT, BlockSizes, DEADLINE, NodeMemory, NodeReader, PEER};

/// The name in the certificates.
const NAME: &str = "pillion.mesh";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["certificates", folder] => certificates(Path::new(folder)),
        ["serve", ref rest @ ..] => serve(rest),
        ["fetch", address, ref rest @ ..] => fetch(address.parse().expect("an address"), rest),
        _ => panic!("certificates FOLDER, or serve or fetch: see the source"),
    }
}

fn sizes(words: &[&str]) -> BlockSizes {
    let number = |at: usize| words[at].parse().expect("a number");
    BlockSizes { blocks: number(0), block_bytes: number(1) }
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

/// A transport, its address, and its events.
type Started = (Arc<dyn Transport>, SocketAddr, Receiver<TransportEvent>);

fn start(name: &str, words: &[&str], memory: &NodeMemory) -> Started {
    let (sender, ups) = channel();
    let (node, security, blocks) = (node::name_of(name), security(words), memory.blocks.clone());
    let up = move |up| drop(sender.send(up));
    let over = words[2];
    let config = tcp::TcpConfig::new(node, BOOT, security);
    let Some((nic, queue_pairs)) = over.split_once(':') else {
        let streams = over.parse().expect("a number");
        let config = tcp::TcpConfig { streams, ..config };
        let tcp = Tcp::start(config, blocks, up).expect("it starts");
        let address = tcp.listen_address();
        return (Arc::new(tcp), address, ups);
    };
    let qps_per_peer = queue_pairs.parse().expect("a number");
    // An emulated NIC may be slow.
    let limits = TcpLimits { first_byte: DEADLINE, progress: DEADLINE, ..TcpLimits::default() };
    let config = tcp::TcpConfig { limits, ..config };
    let config =
        rdma::RdmaConfig { qps_per_peer, lease: DEADLINE, ..rdma::RdmaConfig::new(config, vec![nic.into()]) };
    let rdma = Rdma::start(config, blocks, up).expect("it starts");
    while !rdma.ready() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let address = rdma.listen_address();
    (Arc::new(rdma), address, ups)
}

fn serve(words: &[&str]) {
    let memory = NodeMemory::with_blocks(sizes(words)).expect("memory");
    let (transport, address, ups) = start("owner", words, &memory);
    transport.add_peer(PEER, node::make_peer("reader", address));
    println!("{address}");
    // The decisions are made on a thread of their own, as in a sidecar.
    std::thread::spawn(move || node::serve_blocks(&*transport, &ups, &memory));
    std::io::stdin().lines().for_each(drop);
}

fn fetch(address: SocketAddr, words: &[&str]) {
    let memory = NodeMemory::without_blocks(sizes(words)).expect("memory");
    let (transport, _, ups) = start("reader", words, &memory);
    let mut reader = NodeReader::new(transport, ups, &memory, "owner", address);
    let mut get = |numbers| reader.fetch(numbers).unwrap_or_else(|error| panic!("{error}"));
    let all = 0..memory.places.len();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a command");
        match line.split_once(' ') {
            None => println!("{}", get(all.clone())),
            Some((_, count)) => {
                let numbers = all.clone().cycle().take(count.parse().expect("a number"));
                let micros = numbers.map(|number| format!("{:.1}", get(number..number + 1) * 1e6));
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
