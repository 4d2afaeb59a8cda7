//! Speed of blocks from a peer by the mesh's own client and server, compared with plain TCP sockets between
//! the same two ends.
//!
//! Both ways use the same number of streams and the same memory at both ends, without TLS, and take turns in
//! each round. Before the rounds, each way fetches all blocks once, so that no round pays for a first use:
//! the mesh opens its connections, and the serving end computes the checksums of its blocks and keeps them;
//! the plain sockets are connected already, and leave TCP's slow start.
//!
//! The serving end decides how many blocks are fetched and their size. It has one port for plain sockets and
//! another one for the mesh. The greeting of a plain socket tells the reading end both numbers and the mesh's
//! port.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use clap::Args;
use mesh::transport::Transport;
use mesh::transport::tcp::{STREAMS_DEFAULT, STREAMS_MAX, Security, Tcp, TcpConfig};

use super::copy::time_copies;
use super::disk::block_bytes;
use super::node::{self, BOOT, BlockSizes, NodeMemory, NodeReader, PEER};
use super::{BenchError, BenchFigures, GIB, ROUNDS, median, part, rounded};
use sidecar::config::{IpPort, Size};
use sidecar::system::clock::Clock;

const OWNER: &str = "owner";
const READER: &str = "reader";
const MAGIC: u64 = u64::from_le_bytes(*b"PILLPEER");
/// Words of a greeting: magic, blocks, bytes of a block, the mesh's port.
const GREETING_WORDS: usize = 4;
/// Words of a request: the first block, and the count.
const REQUEST_WORDS: usize = 2;
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Limit of one end's wait for the other. Plain sockets are silent during measurements of the mesh, which no shorter
/// limit may end.
const SILENT_MAX: Duration = Duration::from_secs(120);
/// Plain connections at a time: those of one reader, and one more.
const CONNECTIONS_MAX: usize = STREAMS_MAX + 1;
/// Single blocks fetched in each round.
const ONES: usize = 200;

/// Options of `pillion bench peer`.
#[derive(Args, Clone, Debug)]
pub struct PeerOptions {
    /// Address at which pillion bench peer --serve runs on the other host [default: both ends here, on loopback]
    #[arg(value_name = "HOST:PORT", conflicts_with_all = ["serve", "size", "block_size"])]
    pub address: Option<String>,
    /// Serve blocks at this address, and the mesh at the next port, until this command is stopped. Anybody
    /// with access to the ports can read them: random bytes, without TLS
    #[arg(long, value_name = "IP:PORT", conflicts_with = "streams")]
    pub serve: Option<IpPort>,
    /// TCP connections at the same time, as --tcp-streams of pillion serve
    #[arg(long, value_name = "COUNT", default_value_t = STREAMS_DEFAULT)]
    pub streams: usize,
    /// Bytes fetched in each measurement; both ends need as much memory. The serving end decides
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    pub size: Size,
    /// Bytes of a block. The serving end decides
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    pub block_size: Size,
}

/// The serving end: it serves its blocks by plain sockets and by the mesh.
struct Owner {
    listener: TcpListener,
    memory: NodeMemory,
    sizes: BlockSizes,
    mesh: SocketAddr,
    connections: AtomicUsize,
}

/// The plain sockets of the reading end, connected to an owner.
struct Plain(Vec<Mutex<TcpStream>>);

fn sizes(options: &PeerOptions) -> Result<BlockSizes, BenchError> {
    let block_bytes = block_bytes(options.block_size)?;
    let blocks = options.size.as_bytes() / u64::from(block_bytes);
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks > 0).ok_or_else(|| {
        BenchError::option("size", options.size, "it must hold 1 to 2^32 blocks of --block-size")
    })?;
    Ok(BlockSizes { blocks, block_bytes })
}

fn read_words<const N: usize>(mut from: impl Read) -> io::Result<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        *word = u64::from_le_bytes(bytes);
    }
    Ok(words)
}

fn write_words(mut to: impl Write, words: &[u64]) -> io::Result<()> {
    to.write_all(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
}

fn tcp(name: &str, listen: SocketAddr, streams: usize, memory: &NodeMemory) -> Result<Started, BenchError> {
    let (sender, ups) = channel();
    let config =
        TcpConfig { listen, streams, ..TcpConfig::new(node::name_of(name), BOOT, Security::Plaintext) };
    let tcp = Tcp::start(config, memory.blocks.clone(), move |up| drop(sender.send(up)));
    let tcp = tcp.map_err(|error| BenchError::failed("the mesh does not start", error.to_string()))?;
    Ok((tcp.listen_address(), Arc::new(tcp), ups))
}

/// A started transport: its address, the transport, and its events.
type Started = (SocketAddr, Arc<dyn Transport>, std::sync::mpsc::Receiver<mesh::transport::TransportEvent>);

// === impl Owner ===

impl Owner {
    /// Serves by the mesh from now on, and by plain sockets while [`Owner::serve_plain`] runs.
    fn serve_mesh(at: SocketAddr, sizes: BlockSizes) -> Result<Arc<Self>, BenchError> {
        let not_listening = |error: io::Error| {
            BenchError::option(
                "serve",
                at,
                &format!("{error}: name an address of this host, and a free port"),
            )
        };
        let listener = TcpListener::bind(at).map_err(not_listening)?;
        let memory = NodeMemory::with_blocks(sizes)?;
        let next = match at.port() {
            0 => 0,
            port => port.checked_add(1).ok_or_else(|| {
                BenchError::option("serve", at, "the mesh takes the next port: name a lower one")
            })?,
        };
        let (mesh, transport, ups) = tcp(OWNER, (at.ip(), next).into(), 1, &memory)?;
        // The address of a reader is not used: no node fetches from it.
        transport.add_peer(PEER, node::make_peer(READER, at));
        let kept = memory.clone();
        thread::spawn(move || node::serve_blocks(&*transport, &ups, &kept));
        Ok(Arc::new(Self { listener, memory, sizes, mesh, connections: AtomicUsize::new(0) }))
    }

    fn plain_address(&self) -> Result<SocketAddr, BenchError> {
        let address = self.listener.local_addr();
        address.map_err(|error| BenchError::failed("a socket has no address", error.to_string()))
    }

    /// Serves plain sockets, each on a thread of its own, until this process ends.
    fn serve_plain(self: &Arc<Self>) {
        for stream in self.listener.incoming().flatten() {
            if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                self.connections.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!("a connection was refused: {CONNECTIONS_MAX} are open, which is the limit");
                continue;
            }
            let owner = Arc::clone(self);
            thread::spawn(move || {
                // The usual error: the reader has closed the stream.
                let _ = owner.serve_stream(&stream);
                owner.connections.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    fn serve_stream(&self, mut stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENT_MAX))?;
        stream.set_write_timeout(Some(SILENT_MAX))?;
        let BlockSizes { blocks, block_bytes } = self.sizes;
        write_words(stream, &[MAGIC, blocks.into(), block_bytes.into(), self.mesh.port().into()])?;
        loop {
            let [first, count] = read_words::<REQUEST_WORDS>(stream)?;
            let end = first.saturating_add(count).min(blocks.into());
            for (label, offset) in &self.memory.places[first.min(end) as usize..end as usize] {
                let bytes = self.memory.blocks.bytes_at(*offset, label.bytes as usize);
                stream.write_all(bytes.expect("a place lies in the memory"))?;
            }
        }
    }
}

// === impl Plain ===

impl Plain {
    /// Connects to an owner. Returns the sockets, and the sizes and the mesh's address from the owner's
    /// greeting.
    fn connect_streams(address: &str, streams: usize) -> Result<(Self, BlockSizes, SocketAddr), BenchError> {
        let absent = |error: io::Error| {
            let remedy = format!("run pillion bench peer --serve {address} there");
            BenchError::failed("nobody serves", format!("{address}: {error}: {remedy}"))
        };
        let other = || {
            let remedy = "name the address that pillion bench peer --serve of this release has";
            BenchError::failed("another program answers there", format!("{address}: {remedy}"))
        };
        let (mut plain, mut found) = (Vec::new(), None);
        for _ in 0..streams {
            let stream = connect_any(address).map_err(absent)?;
            let greeting = read_words::<GREETING_WORDS>(&stream).map_err(|_| other())?;
            let [MAGIC, blocks, block_bytes, port] = greeting else { return Err(other()) };
            let sizes = u32::try_from(blocks).ok().zip(u32::try_from(block_bytes).ok());
            let (blocks, block_bytes) = sizes.filter(|(blocks, _)| *blocks > 0).ok_or_else(other)?;
            let ip = stream.peer_addr().map_err(absent)?.ip();
            let port = u16::try_from(port).map_err(|_| other())?;
            found = Some((BlockSizes { blocks, block_bytes }, SocketAddr::new(ip, port)));
            plain.push(Mutex::new(stream));
        }
        let (sizes, mesh) = found.expect("there is a stream");
        Ok((Self(plain), sizes, mesh))
    }

    /// Fetches the blocks with these numbers by one of the streams.
    fn fetch(
        &self,
        stream: usize,
        memory: &NodeMemory,
        numbers: std::ops::Range<usize>,
    ) -> Result<(), BenchError> {
        let stream = self.0[stream].lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |problem: String| {
            BenchError::failed(
                "plain sockets failed",
                format!("{problem}: look at the output of the other end"),
            )
        };
        write_words(&*stream, &[numbers.start as u64, numbers.len() as u64])
            .map_err(|error| failed(error.to_string()))?;
        for (label, offset) in &memory.places[numbers] {
            let mut left = label.bytes as usize;
            while left > 0 {
                let at = offset + u64::from(label.bytes) - left as u64;
                match memory.blocks.receive(&*stream, at, left) {
                    Ok(0) => return Err(failed("the other end closed the connection".into())),
                    Ok(more) => left -= more,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(failed(io::Error::from(errno).to_string())),
                }
            }
        }
        Ok(())
    }

    /// Fetches all blocks, an equal part by each stream. Returns GiB/s.
    fn fetch_all(&self, memory: &NodeMemory) -> Result<f64, BenchError> {
        let (streams, count) = (self.0.len(), memory.places.len());
        let bytes = memory.places.iter().map(|(label, _)| u64::from(label.bytes)).sum();
        time_copies(streams, bytes, |stream| {
            self.fetch(stream, memory, stream * count / streams..(stream + 1) * count / streams)
        })
    }
}

/// Connects to the first of the name's addresses that accepts.
fn connect_any(address: &str) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(SILENT_MAX))?;
                stream.set_write_timeout(Some(SILENT_MAX))?;
                return Ok(stream);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// With `--serve`, serves until this process ends; `say` prints the address. Without it, measures against the
/// named serving end, or against one that it starts in this process.
pub(super) fn measure_peer(options: &PeerOptions, say: impl Fn(&str)) -> Result<BenchFigures, BenchError> {
    if !(1..=STREAMS_MAX).contains(&options.streams) {
        let problem = format!("it must be 1 to {STREAMS_MAX}");
        return Err(BenchError::option("streams", options.streams, &problem));
    }
    if let Some(address) = &options.address {
        return measure_from(address, options.streams);
    }
    let owner =
        Owner::serve_mesh(options.serve.map_or((Ipv4Addr::LOCALHOST, 0).into(), |at| at.0), sizes(options)?)?;
    let address = owner.plain_address()?;
    if options.serve.is_some() {
        say(&format!(
            "serving {} at {address}: run pillion bench peer HOST:{} on the other host\n",
            options.size,
            address.port()
        ));
        owner.serve_plain();
        return Err(BenchError::failed("the listener has ended", "start it again"));
    }
    thread::spawn(move || owner.serve_plain());
    measure_from(&address.to_string(), options.streams)
}

fn measure_from(address: &str, streams: usize) -> Result<BenchFigures, BenchError> {
    let (plain, sizes, mesh) = Plain::connect_streams(address, streams)?;
    let memory = NodeMemory::without_blocks(sizes)?;
    let (_, transport, ups) = tcp(READER, (Ipv4Addr::LOCALHOST, 0).into(), streams, &memory)?;
    let mut reader = NodeReader::new(transport, ups, &memory, OWNER, mesh);
    let (all, clock) = (0..reader.block_count(), Clock::start_now());
    let gib = (u64::from(sizes.block_bytes) * u64::from(sizes.blocks)) as f64 / GIB;
    // The pass before the rounds opens the mesh's connections and has the owner compute its checksums.
    reader.fetch(all.clone())?;
    plain.fetch_all(&memory)?;
    let (mut limit, mut own, mut limit_us, mut own_us) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        limit.push(plain.fetch_all(&memory)?);
        own.push(gib / reader.fetch(all.clone())?);
        for number in all.clone().cycle().take(ONES) {
            let began = clock.now();
            plain.fetch(0, &memory, number..number + 1)?;
            limit_us.push((clock.now() - began).as_secs_f64() * 1e6);
            own_us.push(reader.fetch(number..number + 1)? * 1e6);
        }
    }
    let mut figures = BenchFigures::new("peer");
    figures.add_figure("streams", streams);
    figures.compare("fetch", ("plain", &mut limit), ("mesh", &mut own));
    figures.add_figure("plain_block_us", rounded(median(&mut limit_us)));
    figures.add_figure("mesh_block_us", rounded(median(&mut own_us)));
    figures.add_figure("mesh_block_p99_us", rounded(part(&mut own_us, 0.99)));
    Ok(figures)
}
