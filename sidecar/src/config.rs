//! The configuration: command line before environment before file before defaults. Only this module reads the
//! environment.

#[macro_use]
mod layers;

mod control;
mod disk;
mod environment;
mod memory;
mod mesh;
pub mod quotas;
mod values;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

pub use shm_protocol::transport::default_socket;
use thiserror::Error;

pub use self::control::{ControlEndpoints, ControlTcp, Token, default_control_socket, read_token};
pub use self::disk::{Disk, SsdAdmission, SsdIo};
pub use self::environment::find_mistyped;
pub use self::mesh::next_port;
pub use self::mesh::{Mesh, MeshOptions, MeshTcp, Nics};
use self::quotas::NamespaceQuota;
pub use self::values::{IpPort, LogFormat, Severity, Size, Time, UseGpu};

/// The default address of the admin pages.
pub const HTTP_DEFAULT: IpPort = IpPort(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9440));
/// An engine plans loads on leases with half of their life left. A planned load must be accepted: a refused
/// one may end a worker on a GPU. A sidecar's thread was seen to wait 3 s for a core, so half a lease is 5 s
/// at least. Longer leases keep the blocks of a lost engine for too long.
const LEASE_TTL_MS: std::ops::RangeInclusive<u64> = 10_000..=600_000;
const HANDOVER_TTL_MS: std::ops::RangeInclusive<u64> = 1_000..=600_000;
/// Two threads copy as fast as the memory bandwidth left beside a busy engine on a socket allows.
pub const COPY_THREADS_DEFAULT: usize = 2;
/// More threads than the largest machines have memory channels gain nothing.
const COPY_THREADS: std::ops::RangeInclusive<usize> = 1..=32;
/// Largest configuration file, in bytes; usual ones have a dozen lines.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// Values of the file have the syntax of the flags.
macro_rules! texts_of_the_file {
    ($($value:ty),*) => {$(
        impl TryFrom<String> for $value {
            type Error = String;
            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    )*};
}
texts_of_the_file!(
    Disk,
    IpPort,
    Severity,
    LogFormat,
    NamespaceQuota,
    Size,
    SsdAdmission,
    SsdIo,
    Time,
    UseGpu
);

/// Parses the name of a named enum; the error lists all names.
macro_rules! choices {
    ($($name:ty: $wrong:literal),* $(,)?) => {$(
        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                let wrong = || {
                    let valid = Self::ALL.map(Self::name).join(", ");
                    format!(concat!("\"{}\" is not ", $wrong, ": write one of {}"), text, valid)
                };
                Self::named(text).ok_or_else(wrong)
            }
        }
    )*};
}
choices! {
    Severity: "a log level",
    LogFormat: "a log format",
    SsdAdmission: "an admission rule",
    SsdIo: "a way to move bytes",
    UseGpu: "a value of --gpu",
}

options! {
    /// Options of `pillion serve`, each as a flag and as a key of the file.
    pub struct ServeOptions;
    /// The options with their defaults.
    pub struct SettledOptions;

    /// UNIX socket for engines [default: /run/pillion/pillion.sock; for a user with XDG_RUNTIME_DIR,
    /// $XDG_RUNTIME_DIR/pillion/pillion.sock]
    ///
    /// Engines have the same default: change both sides together (vLLM: pillion.socket). At most 107 bytes. A missing
    /// folder is created, and the socket gets mode 0660. The socket of a dead sidecar is replaced; a live one, or any
    /// other file, stops the start.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Memory for KV blocks, such as 30GiB or 512MiB (required)
    ///
    /// A number with a unit (512MiB, 30GiB; MB and GB are decimal), or in Kubernetes notation (30Gi, 30G, bytes). 4
    /// MiB, one segment, to 2 TiB. The container's memory limit must also hold 64 MiB more, --mesh-directory-size in
    /// a mesh, and 100 bytes for each 2 MiB of --ssd.
    #[arg(long, value_name = "SIZE")]
    dram: Option<Size>,
    /// Folder, file or block device for blocks without room in memory, and the size to use there, such as
    /// /nvme/pillion:500GiB. May be given several times
    ///
    /// At least 17 MiB, each path once. In a folder the file is named pillion.log. A missing file is created only on
    /// a mounted disk; with :create behind the size it is created on any disk, the root disk too.
    #[arg(long, value_name = "PATH:SIZE[:create]", value_delimiter = ',')]
    #[serde(default)]
    ssd: Vec<Disk>,
    /// Stop at the start if one of the --ssd paths cannot be used, instead of serving without it
    #[arg(long)]
    ssd_required: Option<bool> = false,
    /// How bytes move between the --ssd paths and memory: io_uring, threads, or auto: threads only if the kernel
    /// refuses io_uring
    #[arg(long, value_name = "auto|io_uring|threads")]
    ssd_io: Option<SsdIo> = SsdIo::Auto,
    /// Saved blocks to write to the --ssd paths: all, or second-hit for blocks requested again
    ///
    /// With second-hit a block is written when a later request offers it again, or when it comes back after its
    /// eviction. Use it to write less, or if saves come faster than the disk writes; the first reuse of a block is
    /// then not served from a disk.
    #[arg(long, value_name = "all|second-hit")]
    ssd_admission: Option<SsdAdmission> = SsdAdmission::All,
    /// Address of /healthz, /readyz, /metrics and the status page at /
    ///
    /// Pass 0.0.0.0:9440 if probes or Prometheus connect from outside the host or pod. Port 0 takes any free port and
    /// logs it.
    #[arg(long, value_name = "IP:PORT")]
    http: Option<IpPort> = HTTP_DEFAULT,
    /// File on tmpfs or hugetlbfs for the blocks, instead of anonymous memory
    ///
    /// The next sidecar with the same file keeps its blocks. The file has mode 0600, is locked while in use, and
    /// never shrinks.
    #[arg(long, value_name = "FILE")]
    pool_path: Option<PathBuf>,
    /// Path of the --pool-path file on a read-only mount
    ///
    /// Engines then cannot write to the file. Use it if engines run as root or as the sidecar's user.
    #[arg(long, value_name = "FILE")]
    pool_view: Option<PathBuf>,
    /// Keep the blocks in huge pages of 2 MiB: reserved ones, or those of a --pool-path on hugetlbfs
    #[arg(long)]
    hugepages: Option<bool> = false,
    /// Most bytes of --dram for the blocks of a namespace, such as 7cec6c4d=10GiB. May be given several times
    ///
    /// The namespace is 8 to 32 hex digits, or `others` for all namespaces without a quota of their own. At most 256
    /// quotas.
    #[arg(long, value_name = "NAMESPACE=SIZE", value_delimiter = ',')]
    quota: Option<Vec<NamespaceQuota>>,
    /// Group, by name or number, whose members may connect in addition to this user and root
    ///
    /// Members are processes with this primary group, and the group's users in /etc/group of the sidecar's container.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// UNIX socket of pillion ctl, for this user and root [default: beside --socket, as pillion.control.sock beside
    /// pillion.sock]
    #[arg(long, value_name = "PATH")]
    control_socket: Option<PathBuf>,
    /// TCP address of pillion ctl, in addition to the socket; requires --control-token-file
    #[arg(long, value_name = "IP:PORT")]
    control_listen: Option<IpPort>,
    /// File with the token for clients of --control-listen. Other users must not be able to read it
    #[arg(long, value_name = "FILE")]
    control_token_file: Option<PathBuf>,
    /// TCP address at which routers ask how much of a prompt this pod has; requires --score-token-file
    ///
    /// Scores take at most 5 % of each second of the thread that serves engines. Port 0 takes any free port and logs it.
    #[arg(long, value_name = "IP:PORT")]
    score_listen: Option<IpPort>,
    /// File with the token of routers for --score-listen, other than that of --control-token-file. Other users must
    /// not be able to read it
    #[arg(long, value_name = "FILE")]
    score_token_file: Option<PathBuf>,
    /// How long found blocks are held for a request that has not loaded them yet
    ///
    /// 10s to 600s, in whole seconds (s) or milliseconds (ms). A load is planned only while half of its lease is
    /// left; that half must outlast a wait of the sidecar for a CPU core (3 s were measured). Raise it if loads fail
    /// because their lease has expired.
    #[arg(long, value_name = "TIME")]
    // A lease outlives the scheduling of a request in a busy engine; leased blocks cannot be evicted.
    lease_ttl: Option<Time> = Time::from_millis(30_000),
    /// How long a prompt computed for another engine is kept for the load by that engine
    ///
    /// 1s to 600s, in whole seconds (s) or milliseconds (ms). Raise it if the decode engine loads later. Such prompts
    /// take at most half of the memory; beyond it the oldest is kept like any other block.
    #[arg(long, value_name = "TIME")]
    // An engine with full memory starts a request only after the end of others.
    handover_ttl: Option<Time> = Time::from_millis(30_000),
    /// Options of the mesh.
    #[command(flatten)]
    #[serde(default)]
    mesh: MeshOptions,
    /// Number of threads for copies of blocks
    ///
    /// 1 to 32. Raise it if the part copy of pillion_load_duration_seconds is long and CPU cores are free.
    #[arg(long, value_name = "COUNT")]
    copy_threads: Option<usize> = COPY_THREADS_DEFAULT,
    /// Serve engines on the visible GPUs: auto or off
    ///
    /// With off the sidecar does not open libcuda.
    #[arg(long, value_name = "auto|off")]
    gpu: Option<UseGpu> = UseGpu::Auto,
    /// Least severe messages to log: error, warn, info or debug
    ///
    /// Messages go to standard error.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<Severity> = Severity::Info,
    /// Format of log lines: text, or json with one object a line
    ///
    /// An object holds timestamp, level, message, and the fields of the message.
    #[arg(long, value_name = "text|json")]
    log_format: Option<LogFormat> = LogFormat::Text,
}

/// A complete configuration within its limits.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    pub socket: PathBuf,
    pub dram: Size,
    pub http: SocketAddr,
    /// Limits of namespaces.
    pub quotas: Vec<NamespaceQuota>,
    /// The mesh of this node.
    pub mesh: Option<Mesh>,
    pub control: ControlEndpoints,
    settled: SettledOptions,
}

/// An invalid configuration; the text names the remedy.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// The file is not a configuration.
    #[error("configuration file {path}: {text}")]
    Malformed {
        path: PathBuf,
        /// The line, and the valid names or values.
        text: String,
    },
    /// The size of the memory is missing.
    #[error("--dram is missing, the memory for KV blocks: pass --dram SIZE, such as --dram 30GiB")]
    DramMissing,
    /// A view needs a pool file.
    #[error("--pool-view is given without --pool-path: pass both, two paths of one file, or neither")]
    ViewAlone,
    /// A value is out of range.
    #[error("{option} is {value}; it must be {rule}")]
    Range {
        option: &'static str,
        value: String,
        /// The valid range.
        rule: &'static str,
    },
    /// Options of the mesh that are missing or contradict each other.
    #[error("{0}")]
    Mesh(String),
    /// Options of the control address, or the file of its token.
    #[error("{0}")]
    Control(String),
    /// The container cannot hold the pool.
    #[error(
        "--dram {dram} needs {needed_mib} MiB, of which {beside} are beside the pool, and the limit set by {place} is \
         {limit_mib} MiB: lower --dram, or in a mesh --mesh-directory-size, or raise that limit"
    )]
    MemoryLimit {
        dram: Size,
        /// Memory beside the pool: the sidecar's own, the mesh's directory and the disks' index.
        beside: Size,
        /// Pool and memory beside it, in whole MiB.
        needed_mib: u64,
        limit_mib: u64,
        /// The file with the limit.
        place: String,
    },
}

// === impl ServeOptions ===

impl ServeOptions {
    /// Reads a configuration file.
    pub fn read_file(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let malformed = |text: String| ConfigError::Malformed { path: path.to_owned(), text };
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(malformed(format!("it has {bytes} bytes, of at most {FILE_BYTES_MAX}: shorten it")));
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        toml::from_str(&text).map_err(|error| malformed(error.to_string()))
    }

    pub fn complete(self) -> Result<ServeConfig, ConfigError> {
        let settled = self.settle();
        let (lease, handover) = (settled.lease_ttl, settled.handover_ttl);
        let rule = "10s to 600s: a shorter lease may end before its load is read";
        check_range("lease-ttl", lease, LEASE_TTL_MS.contains(&lease.as_millis()), rule)?;
        check_range("handover-ttl", handover, HANDOVER_TTL_MS.contains(&handover.as_millis()), "1s to 600s")?;
        let threads = settled.copy_threads;
        check_range("copy-threads", threads, COPY_THREADS.contains(&threads), "1 to 32")?;
        if settled.pool_view.is_some() && settled.pool_path.is_none() {
            return Err(ConfigError::ViewAlone);
        }
        let socket = settled.socket.clone().unwrap_or_else(default_socket);
        let control = settled.control_socket.clone().unwrap_or_else(|| default_control_socket(&socket));
        let listen = |listen: Option<IpPort>| listen.map(|listen| listen.0);
        let config = ServeConfig {
            control: control::complete_control(
                control,
                (listen(settled.control_listen), settled.control_token_file.as_deref()),
                (listen(settled.score_listen), settled.score_token_file.as_deref()),
            )?,
            socket,
            dram: settled.dram.ok_or(ConfigError::DramMissing)?,
            http: settled.http.0,
            quotas: settled.quota.clone().unwrap_or_default(),
            mesh: settled.mesh.clone().complete()?,
            settled,
        };
        quotas::check_quotas(&config.quotas)?;
        disk::check_disks(&config.ssd)?;
        memory::check_memory(&config)?;
        Ok(config)
    }
}

fn check_range(
    option: &'static str,
    value: impl ToString,
    valid: bool,
    rule: &'static str,
) -> Result<(), ConfigError> {
    if valid { Ok(()) } else { Err(ConfigError::Range { option, value: value.to_string(), rule }) }
}

// === impl ServeConfig ===

impl std::ops::Deref for ServeConfig {
    type Target = SettledOptions;

    fn deref(&self) -> &SettledOptions {
        &self.settled
    }
}

impl ServeConfig {
    /// A warning for a sidecar with a GPU and little memory beside the pool in its container's limit.
    pub fn too_little_for_gpu(&self) -> Option<String> {
        memory::too_little_for_gpu(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ServeOptions, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn the_command_line_overrides_the_file() {
        let file =
            parse("dram = \"2MiB\"\nsocket = \"/a\"\nlease-ttl = \"12500ms\"\nhttp = \"[::1]:1\"").unwrap();
        let flags = ServeOptions { dram: Some("4MiB".parse().unwrap()), ..ServeOptions::default() };
        let config = flags.or(file).complete().unwrap();
        assert_eq!(config.dram.as_bytes(), 4 << 20);
        assert_eq!(config.socket, Path::new("/a"));
        assert_eq!(config.lease_ttl.as_millis(), 12_500);
        assert_eq!(config.http.to_string(), "[::1]:1");
        assert_eq!(config.gpu, UseGpu::Auto);
    }

    #[test]
    fn disks_of_the_command_line_replace_those_of_the_file() {
        let file = parse("dram = \"4MiB\"\nsocket = \"/a\"\nssd = [\"/x:1GiB\", \"/y:1GiB\"]").unwrap();
        let config = file.clone().complete().unwrap();
        assert_eq!((config.ssd.len(), config.ssd_admission), (2, SsdAdmission::All));
        let admission = Some(SsdAdmission::SecondHit);
        let flags = ServeOptions {
            ssd: vec!["/z:1GiB".parse().unwrap()],
            ssd_admission: admission,
            ..ServeOptions::default()
        };
        let config = flags.or(file).complete().unwrap();
        assert_eq!((config.ssd[0].path.to_str(), config.ssd.len()), (Some("/z"), 1));
        assert_eq!(config.ssd_admission, SsdAdmission::SecondHit);
        assert!(parse("ssd = [\"/x\"]").unwrap_err().to_string().contains("500GiB"));
    }

    #[test]
    fn gpus_are_served_unless_switched_off() {
        let file = parse("dram = \"4MiB\"\nsocket = \"/a\"\ngpu = \"off\"").unwrap();
        assert_eq!(file.clone().complete().unwrap().gpu, UseGpu::Off);
        let flags = ServeOptions { gpu: Some(UseGpu::Auto), ..ServeOptions::default() };
        assert_eq!(flags.or(file).complete().unwrap().gpu, UseGpu::Auto);
        let error = parse("gpu = \"cuda:0\"").unwrap_err().to_string();
        assert!(error.contains("cuda:0") && error.contains("auto, off"), "{error}");
    }

    #[test]
    fn what_the_pool_is_divided_into_is_said_in_the_file_too() {
        let text = "dram = \"4MiB\"\nsocket = \"/a\"\nhugepages = true\nquota = [\"others=1MiB\", \"0123abcd=2MiB\"]";
        let file = parse(text).unwrap();
        let config = file.clone().complete().unwrap();
        assert!(config.hugepages);
        assert_eq!(config.quotas[1], "0123ABCD=2MiB".parse().unwrap());
        let flags =
            ServeOptions { hugepages: Some(false), quota: Some(Vec::new()), ..ServeOptions::default() };
        let config = flags.or(file).complete().unwrap();
        assert!(!config.hugepages && config.quotas.is_empty());
        assert!(parse("quota = [\"1GiB\"]").unwrap_err().to_string().contains("others=5GiB"));
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_valid_ones() {
        let error = parse("dramm = \"2MiB\"").unwrap_err().to_string();
        assert!(
            error.contains("dramm") && error.contains("`dram`") && error.contains("`pool-path`"),
            "{error}"
        );
        let error = parse("log-level = \"loud\"").unwrap_err().to_string();
        assert!(error.contains("loud") && error.contains("debug"), "{error}");
    }

    #[test]
    fn what_is_missing_or_out_of_range_is_said() {
        let socket = || ServeOptions { socket: Some("/a".into()), ..ServeOptions::default() };
        assert!(matches!(socket().complete(), Err(ConfigError::DramMissing)));
        let dram = || ServeOptions { dram: Some("4MiB".parse().unwrap()), ..socket() };
        let view = ServeOptions { pool_view: Some("/view".into()), ..dram() };
        assert!(matches!(view.complete(), Err(ConfigError::ViewAlone)));
        for wrong in ["601s", "9999ms", "10ms", "0s"] {
            let options = ServeOptions { lease_ttl: Some(wrong.parse().unwrap()), ..dram() };
            assert!(options.complete().unwrap_err().to_string().contains("10s to 600s"), "{wrong}");
        }
        let many = ServeOptions { copy_threads: Some(33), ..dram() };
        assert!(many.complete().unwrap_err().to_string().contains("1 to 32"));
        assert!(
            ServeOptions::read_file(Path::new("/nonexistent"))
                .unwrap_err()
                .to_string()
                .contains("/nonexistent")
        );
    }
}
