//! The options of the mesh: other sidecars, their addresses and their certificates.

use std::net::SocketAddr;
use std::path::PathBuf;

#[cfg(feature = "etcd")]
use mesh::control::Etcd;
use mesh::control::{self, AnnouncedEngine, ENGINES_MAX, Members};
use mesh::tls::{Security, Tls};
use mesh::transport::NodeId;
use mesh::transport::{rdma, tcp};

use super::{ConfigError, IpPort, Size, check_range};

/// Bytes of the directory of all peers' blocks: a smaller one is useless, and no mesh needs a larger one.
const DIRECTORY_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 30;

options! {
    /// Options of the mesh, each as a flag and as a key of the file's table `mesh`.
    pub struct MeshOptions;
    /// The options with their defaults.
    struct SettledMesh;

    /// Share blocks with the sidecars of other pods, which follow this sidecar's inventory at this address, such as
    /// the pod's IP and port 9441
    ///
    /// Peers fetch blocks at the next port, and with --nics arrange RDMA at the one after it. The address is sent to
    /// peers, so 0.0.0.0 is refused.
    #[arg(long = "mesh-listen", value_name = "IP:PORT")]
    listen: Option<IpPort>,
    /// Name of this node in the mesh, different for each sidecar [default: the host's name]
    ///
    /// Keep it the same across restarts. 1 to 253 printable ASCII characters.
    #[arg(long = "node-id", value_name = "NAME")]
    node_id: Option<String>,
    /// Another sidecar's --mesh-listen, or a name with the addresses of several sidecars, such as a headless Service.
    /// May be given several times
    ///
    /// Every address of a name is followed, and names are resolved again every 10 s. This node's own address may be
    /// among them. A node serves only members that it has found itself; a peer that starts later is dialled as soon
    /// as it follows this node. Excludes --etcd.
    #[arg(long = "peer", value_name = "HOST:PORT", value_delimiter = ',')]
    #[serde(default)]
    peer: Vec<String>,
    /// Find the other sidecars in etcd, at http://HOST:PORT or https://HOST:PORT of one of its members. May be given
    /// several times
    ///
    /// Each sidecar registers one key under a lease of 10 s. A killed sidecar registers again when that lease has
    /// ended, or at once if it returns with its pool file. While etcd is unreachable the last known members stay in
    /// use. Excludes --peer.
    #[arg(long = "etcd", value_name = "URL", value_delimiter = ',')]
    #[serde(default)]
    etcd: Vec<String>,
    /// CA certificates, in PEM, that etcd's certificate must be signed by
    #[arg(long = "etcd-ca", value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// This node's certificate for etcd, in PEM; requires --etcd-key
    #[arg(long = "etcd-cert", value_name = "FILE")]
    etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert, in PEM
    #[arg(long = "etcd-key", value_name = "FILE")]
    etcd_key: Option<PathBuf>,
    /// User name at etcd; requires --etcd-password-file
    #[arg(long = "etcd-user", value_name = "NAME")]
    etcd_user: Option<String>,
    /// File with the password of --etcd-user
    #[arg(long = "etcd-password-file", value_name = "FILE")]
    etcd_password_file: Option<PathBuf>,
    /// An engine of this node for routers of the mesh: its URL and role (prefill, decode or both), such as
    /// http://10.0.0.1:8000=both. May be given 16 times
    #[arg(long = "engine-url", value_name = "URL=ROLE", value_delimiter = ',')]
    #[serde(default)]
    engine_url: Vec<AnnouncedEngine>,
    /// Name of the mesh; sidecars of a mesh with another name are refused
    #[arg(long = "mesh-name", value_name = "NAME")]
    name: Option<String> = control::MESH_DEFAULT.to_owned(),
    /// This node's certificate for its peers, in PEM; requires --mesh-key, --mesh-ca and --mesh-cert-name
    ///
    /// All ports of the mesh then use mutual TLS 1.3. Changed files are read again without a restart.
    #[arg(long = "mesh-cert", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Private key of --mesh-cert, in PEM
    #[arg(long = "mesh-key", value_name = "FILE")]
    key: Option<PathBuf>,
    /// CA certificates, in PEM, that peers' certificates must be signed by
    #[arg(long = "mesh-ca", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// DNS name or IP address that the certificate of every node carries
    #[arg(long = "mesh-cert-name", value_name = "NAME")]
    cert_name: Option<String>,
    /// Run the mesh without encryption and authentication
    ///
    /// Anybody who reaches the ports and knows a member's name can then read blocks. Use it only in a network where
    /// everybody may read every block. A mesh needs either this or certificates.
    #[arg(long = "mesh-plaintext")]
    plaintext: Option<bool> = false,
    /// Memory for the directory of the blocks that peers keep, about 2.4 bytes a block
    ///
    /// 1MiB to 64GiB, in equal shares for all peers. If a peer keeps more blocks than its share holds, only one of 2
    /// to 256 of them is known, and the log says so: raise the size. About once an hour the sidecar checks whether
    /// more would fit.
    #[arg(long = "mesh-directory-size", value_name = "SIZE")]
    directory_size: Option<Size> = Size::new(control::DIRECTORY_BYTES_DEFAULT as u64),
    /// TCP connections to each peer that blocks are fetched from
    ///
    /// 1 to 64. Lower it on every node if pillion_mesh_refusals_total{reason="full"} grows.
    #[arg(long = "tcp-streams", value_name = "COUNT")]
    tcp_streams: Option<usize> = tcp::STREAMS_DEFAULT,
    /// Move blocks by RDMA over these NICs, such as mlx5_0,mlx5_1; peers without NICs are reached over TCP
    ///
    /// All nodes with NICs need the same number of them; others are refused. NICs of two nodes are paired by NUMA
    /// node, then by order. RDMA traffic has no encryption and no authentication, even with TLS. Needs libibverbs, and
    /// the right to lock the pool in memory; blocks to and from a node without that right travel over TCP, and its
    /// log names the remedy.
    #[arg(long = "nics", value_name = "NAME,...", value_delimiter = ',')]
    #[serde(default)]
    nics: Vec<String>,
    /// Queue pairs of each NIC to each peer that has NICs; the same number on both sides
    #[arg(long = "qps-per-peer", value_name = "COUNT")]
    qps_per_peer: Option<usize> = rdma::QPS_PER_PEER_DEFAULT,
}

/// The mesh of this node.
#[derive(Clone, Debug)]
pub struct Mesh {
    /// The address for peers that follow this node's inventory.
    pub listen: SocketAddr,
    pub node: NodeId,
    pub name: String,
    /// The way to find the other members.
    pub members: Members,
    /// Engines announced to routers.
    pub engines: Vec<AnnouncedEngine>,
    /// Authentication and encryption.
    pub security: Security,
    /// Memory for the directory of all peers' blocks.
    pub directory_bytes: usize,
    /// Transport of blocks, except for peers reached by RDMA.
    pub tcp: MeshTcp,
    /// Transport of blocks between nodes with NICs.
    pub rdma: Option<Nics>,
}

#[derive(Clone, Debug)]
pub struct MeshTcp {
    /// The address for peers' connections.
    pub listen: SocketAddr,
    /// Connections to each peer.
    pub streams: usize,
}

#[derive(Clone, Debug)]
pub struct Nics {
    /// The TCP address for peers' RDMA handshakes.
    pub listen: SocketAddr,
    /// Names of the NICs.
    pub names: Vec<String>,
    /// Queue pairs of each NIC to each peer.
    pub qps_per_peer: usize,
}

fn wrong<T>(text: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::Mesh(text.into()))
}

// === impl MeshOptions ===

impl MeshOptions {
    /// The mesh, if its options are given.
    pub(super) fn complete(self) -> Result<Option<Mesh>, ConfigError> {
        let Some(IpPort(listen)) = self.listen else {
            return match self.first_given() {
                Some(option) => wrong(format!(
                    "{option} has no effect without a mesh: pass --mesh-listen IP:PORT, such as the pod's IP and 9441, \
                     or leave it out"
                )),
                None => Ok(None),
            };
        };
        if listen.ip().is_unspecified() {
            return wrong(format!(
                "--mesh-listen {listen} is not an address that peers can connect to: pass the one at which they reach \
                 this node, such as the pod's IP"
            ));
        }
        let settled = self.clone().settle();
        let tcp = MeshTcp { listen: next_port(listen)?, streams: settled.tcp_streams };
        check_range("tcp-streams", tcp.streams, (1..=tcp::STREAMS_MAX).contains(&tcp.streams), "1 to 64")?;
        let rdma = self.rdma(tcp.listen, settled.qps_per_peer)?;
        let node = self.node_id.clone().map_or_else(host_name, Ok)?;
        let Ok(node) = NodeId::new(&node) else {
            return wrong(format!("--node-id '{node}' must be 1 to 253 printable ASCII characters"));
        };
        let (security, size) = (self.security()?, settled.directory_size);
        check_range(
            "mesh-directory-size",
            size,
            DIRECTORY_BYTES.contains(&size.as_bytes()),
            "1MiB to 64GiB",
        )?;
        let engines = self.engine_url.clone();
        check_range("engine-url", engines.len(), engines.len() <= ENGINES_MAX, "given 16 times at most")?;
        let (members, directory_bytes, name) = (self.members()?, size.as_bytes() as usize, settled.name);
        Ok(Some(Mesh { listen, node, name, members, engines, security, directory_bytes, tcp, rdma }))
    }

    /// A given option without effect outside a mesh.
    fn first_given(&self) -> Option<&'static str> {
        let given = [
            (!self.peer.is_empty(), "--peer"),
            (!self.etcd.is_empty(), "--etcd"),
            (!self.engine_url.is_empty(), "--engine-url"),
            (self.name.is_some(), "--mesh-name"),
            (self.node_id.is_some(), "--node-id"),
            (self.cert.is_some(), "--mesh-cert"),
            (self.key.is_some(), "--mesh-key"),
            (self.ca.is_some(), "--mesh-ca"),
            (self.cert_name.is_some(), "--mesh-cert-name"),
            (self.plaintext.is_some(), "--mesh-plaintext"),
            (self.directory_size.is_some(), "--mesh-directory-size"),
            (self.tcp_streams.is_some(), "--tcp-streams"),
            (!self.nics.is_empty(), "--nics"),
            (self.qps_per_peer.is_some(), "--qps-per-peer"),
        ];
        given.into_iter().find_map(|(given, name)| given.then_some(name)).or_else(|| self.first_of_etcd())
    }

    /// A given option without effect outside `--etcd`.
    fn first_of_etcd(&self) -> Option<&'static str> {
        let given = [
            (self.etcd_ca.is_some(), "--etcd-ca"),
            (self.etcd_cert.is_some(), "--etcd-cert"),
            (self.etcd_key.is_some(), "--etcd-key"),
            (self.etcd_user.is_some(), "--etcd-user"),
            (self.etcd_password_file.is_some(), "--etcd-password-file"),
        ];
        given.into_iter().find_map(|(given, name)| given.then_some(name))
    }

    /// The NICs, if any are named; RDMA takes the port after `tcp`.
    fn rdma(&self, tcp: SocketAddr, qps_per_peer: usize) -> Result<Option<Nics>, ConfigError> {
        if self.nics.is_empty() {
            return match self.qps_per_peer {
                Some(_) => {
                    wrong("--qps-per-peer has no effect without --nics: pass the NICs too, or leave it out")
                }
                None => Ok(None),
            };
        }
        let (listen, names) = (next_port(tcp)?, self.nics.clone());
        Ok(Some(Nics { listen, names, qps_per_peer }))
    }

    pub fn security(&self) -> Result<Security, ConfigError> {
        let plaintext = self.plaintext == Some(true);
        match (&self.cert, &self.key, &self.ca, &self.cert_name) {
            (None, None, None, None) if plaintext => Ok(Security::Plaintext),
            (None, None, None, None) => wrong(
                "the mesh has no certificates for mutual TLS: pass --mesh-cert, --mesh-key, --mesh-ca and \
                 --mesh-cert-name; or, in a network where everybody may read every block, --mesh-plaintext",
            ),
            _ if plaintext => {
                wrong("--mesh-plaintext and the certificates exclude each other: leave one out")
            }
            (Some(certificate), Some(key), Some(ca), Some(name)) => {
                let (certificate, key, ca) = (certificate.clone(), key.clone(), ca.clone());
                Ok(Security::Tls(Tls { certificate, key, ca, name: name.clone() }))
            }
            (cert, key, ca, _) => {
                let missing = [(cert, "--mesh-cert"), (key, "--mesh-key"), (ca, "--mesh-ca")];
                let missing = missing.into_iter().find_map(|(file, option)| file.is_none().then_some(option));
                wrong(format!("mutual TLS lacks {}: pass it too", missing.unwrap_or("--mesh-cert-name")))
            }
        }
    }

    fn members(self) -> Result<Members, ConfigError> {
        let of_etcd = self.first_of_etcd();
        match (self.peer.is_empty(), self.etcd.is_empty(), of_etcd) {
            (true, true, _) => wrong(
                "the mesh has no way to find other sidecars. Pass --peer HOST:PORT for each of them or for a name \
                     of all, or --etcd URL",
            ),
            (false, false, _) => wrong("--peer and --etcd exclude each other: leave one out"),
            (false, true, Some(given)) => wrong(format!(
                "{given} is given without --etcd URL: leave it out, or pass --etcd URL instead of --peer"
            )),
            (false, true, None) => {
                let wrong_peer = self.peer.iter().find_map(|peer| control::check_peer(peer).err());
                match wrong_peer {
                    Some(error) => wrong(format!("--peer {error}")),
                    None => Ok(Members::Static(self.peer)),
                }
            }
            (true, false, _) => self.registered(),
        }
    }

    /// The members in etcd.
    #[cfg(feature = "etcd")]
    pub fn registered(self) -> Result<Members, ConfigError> {
        let certificate = match (self.etcd_cert, self.etcd_key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return wrong("one of --etcd-cert and --etcd-key is missing: pass both"),
        };
        let user = match (self.etcd_user, self.etcd_password_file) {
            (Some(user), Some(file)) => Some((user, file)),
            (None, None) => None,
            _ => return wrong("one of --etcd-user and --etcd-password-file is missing: pass both"),
        };
        let (endpoints, ca, ttl) = (self.etcd, self.etcd_ca, control::TTL_DEFAULT);
        Ok(Members::Etcd(Etcd { endpoints, ca, certificate, user, ttl }))
    }

    #[cfg(not(feature = "etcd"))]
    pub fn registered(self) -> Result<Members, ConfigError> {
        wrong(
            "--etcd cannot be used: this program was built without its feature `etcd`. Pass --peer HOST:PORT instead, or \
             build the package pillion-cli with its default features",
        )
    }
}

/// The address with the next port; port 0, any free port, stays 0.
pub fn next_port(address: SocketAddr) -> Result<SocketAddr, ConfigError> {
    match address.port().checked_add(u16::from(address.port() != 0)) {
        Some(port) => Ok(SocketAddr::new(address.ip(), port)),
        None => wrong(
            "--mesh-listen has no free port above it: blocks need the next one, and RDMA of --nics the one after it: pass a lower \
             port",
        ),
    }
}

/// The host's name; in a pod the name of the pod.
fn host_name() -> Result<String, ConfigError> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { wrong("the host has no name: pass --node-id NAME") } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> MeshOptions {
        toml::from_str(text).unwrap()
    }

    fn refused(text: &str) -> String {
        options(text).complete().unwrap_err().to_string()
    }

    const LISTEN: &str = "listen = \"10.0.0.1:9441\"\nplaintext = true\n";

    #[test]
    fn there_is_no_mesh_unless_it_is_asked_for() {
        assert!(MeshOptions::default().complete().unwrap().is_none());
        assert!(
            refused("peer = [\"a:1\"]").contains("--peer has no effect without a mesh: pass --mesh-listen")
        );
        assert!(refused("plaintext = true").contains("--mesh-plaintext"));
    }

    #[test]
    fn a_mesh_of_listed_peers() {
        let text = format!("{LISTEN}peer = [\"b:9441\"]\nnode-id = \"a\"\ntcp-streams = 2");
        let mesh = options(&text).complete().unwrap().unwrap();
        assert_eq!((mesh.tcp.listen.port(), mesh.tcp.streams, mesh.node.as_str()), (9442, 2, "a"));
        assert!(mesh.rdma.is_none());
        assert!(matches!(&mesh.members, Members::Static(peers) if peers.len() == 1));
        assert!(matches!(mesh.security, Security::Plaintext) && mesh.name == "default");
        let flags = MeshOptions { peer: vec!["c:1".into(), "d:1".into()], ..MeshOptions::default() };
        let mesh = flags.or(options(&text)).complete().unwrap().unwrap();
        assert!(matches!(&mesh.members, Members::Static(peers) if peers.len() == 2));
    }

    #[test]
    fn all_pods_of_a_service_have_the_same_options() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            mesh: MeshOptions,
        }
        let line = "serve --mesh-listen=10.0.0.1:9441 --peer=pillion.models.svc:9441 --peer=10.0.9.9:9441 --mesh-plaintext";
        let line = <Line as clap::Parser>::try_parse_from(line.split(' ')).unwrap();
        let mesh = line.mesh.complete().unwrap().unwrap();
        let peers = ["pillion.models.svc:9441", "10.0.9.9:9441"];
        assert!(matches!(&mesh.members, Members::Static(listed) if *listed == peers), "{:?}", mesh.members);
        assert_eq!(mesh.node.as_str(), rustix::system::uname().nodename().to_str().unwrap());
        let lists = |peer: &str| options(&format!("{LISTEN}peer = [\"{peer}\"]")).complete();
        assert!(lists("[fd00::1]:9441").is_ok());
        for wrong in ["pillion.models.svc", "pillion:0", "http://pillion:9441"] {
            let text = lists(wrong).unwrap_err().to_string();
            assert!(text.contains(&format!("--peer '{wrong}'")) && text.contains("host:port"), "{text}");
        }
    }

    #[test]
    fn a_node_with_nics_moves_blocks_both_ways() {
        let listen = format!("{LISTEN}peer = [\"b:1\"]\n");
        let text = format!("{listen}nics = [\"mlx5_0\", \"mlx5_1\"]\ntcp-streams = 3");
        let mesh = options(&text).complete().unwrap().unwrap();
        let nics = mesh.rdma.unwrap();
        assert_eq!((nics.names.len(), nics.qps_per_peer, nics.listen.port()), (2, 2, 9443));
        assert_eq!((mesh.tcp.streams, mesh.tcp.listen.port()), (3, 9442));
        assert!(refused(&format!("{listen}qps-per-peer = 2")).contains("--nics"));
    }

    #[test]
    fn addresses_that_nobody_reaches_are_refused() {
        assert!(refused("listen = \"0.0.0.0:9441\"").contains("such as the pod's IP"));
        assert!(refused("listen = \"[::]:9441\"").contains("such as the pod's IP"));
        assert!(refused("listen = \"10.0.0.1:65535\"").contains("pass a lower port"));
        let last = "listen = \"10.0.0.1:65534\"\nplaintext = true\npeer = [\"b:1\"]\n";
        assert!(options(last).complete().is_ok());
        assert!(refused(&format!("{last}nics = [\"a\"]")).contains("RDMA of --nics the one after it"));
    }

    #[test]
    fn nobody_is_trusted_by_accident() {
        let listen = "listen = \"10.0.0.1:1\"\npeer = [\"b:1\"]\n";
        assert!(refused(listen).contains("--mesh-plaintext"), "{}", refused(listen));
        let half = format!("{listen}cert = \"/c\"\nca = \"/a\"\ncert-name = \"mesh\"");
        assert!(refused(&half).contains("lacks --mesh-key"), "{}", refused(&half));
        let whole = format!("{half}\nkey = \"/k\"");
        let mesh = options(&whole).complete().unwrap().unwrap();
        assert!(matches!(&mesh.security, Security::Tls(tls) if tls.name == "mesh"));
        assert!(refused(&format!("{whole}\nplaintext = true")).contains("exclude each other"));
        let off = format!("{whole}\nplaintext = false");
        assert!(matches!(options(&off).complete().unwrap().unwrap().security, Security::Tls(_)));
    }

    #[test]
    fn the_directory_has_the_size_that_it_is_given() {
        let listen = format!("{LISTEN}peer = [\"b:1\"]\n");
        let bytes =
            |text: &str| options(&format!("{listen}{text}")).complete().unwrap().unwrap().directory_bytes;
        assert_eq!((bytes(""), bytes("directory-size = \"2GiB\"")), (512 << 20, 2 << 30));
        for wrong in ["1023KiB", "65GiB"] {
            let text = refused(&format!("{listen}directory-size = \"{wrong}\""));
            assert!(text.contains("mesh-directory-size") && text.contains("1MiB to 64GiB"), "{text}");
        }
        assert!(refused("directory-size = \"1GiB\"").contains("--mesh-listen"));
    }

    #[test]
    fn members_are_listed_or_found_in_etcd() {
        assert!(refused(LISTEN).contains("Pass --peer"));
        let both = format!("{LISTEN}peer = [\"b:1\"]\netcd = [\"http://e:2379\"]");
        assert!(refused(&both).contains("exclude each other"));
        for option in ["etcd-ca", "etcd-password-file"] {
            let text = refused(&format!("{LISTEN}peer = [\"b:1\"]\n{option} = \"/a\""));
            assert!(text.contains(&format!("--{option}")) && text.contains("--etcd URL"), "{text}");
        }
        let peer = format!("{LISTEN}peer = [\"b:1\"]\n");
        assert!(refused(&format!("{peer}tcp-streams = 65")).contains("1 to 64"));
        assert!(refused(&format!("{peer}node-id = \"a b\"")).contains("--node-id"));
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn etcd_has_all_that_a_connection_needs() {
        let etcd = format!("{LISTEN}etcd = [\"http://e:2379\", \"http://f:2379\"]\n");
        let mesh = options(&etcd).complete().unwrap().unwrap();
        assert!(
            matches!(&mesh.members, Members::Etcd(etcd) if etcd.endpoints.len() == 2 && etcd.user.is_none())
        );
        assert!(refused(&format!("{etcd}etcd-user = \"p\"")).contains("--etcd-password-file"));
        assert!(refused(&format!("{etcd}etcd-key = \"/k\"")).contains("--etcd-cert"));
    }

    #[cfg(not(feature = "etcd"))]
    #[test]
    fn a_program_without_etcd_says_so() {
        let text = refused(&format!("{LISTEN}etcd = [\"http://e:2379\"]"));
        assert!(
            text.contains("Pass --peer") && text.contains("pillion-cli with its default features"),
            "{text}"
        );
    }
}
