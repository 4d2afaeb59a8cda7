//! A mesh's needs of this host, checked with the options of `pillion serve`. Names of peers are resolved, and
//! no peer is connected to.

use std::fmt::Display;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use mesh::control::{Resolve, System};
use mesh::tls::Security;
use mesh::transport::rdma;
use rustix::process::{Resource, getrlimit};

use super::{Finding, FindingLevel};
use sidecar::config::{IpPort, MeshOptions, Size, next_port};

/// The kernel's list of RDMA devices.
pub(super) const NICS: &str = "/sys/class/infiniband";
const MIB: u64 = 1 << 20;
/// The bit of CAP_IPC_LOCK among the effective capabilities.
const IPC_LOCK: u32 = 14;

/// Checks the given options of the mesh. The pool has the size `dram`.
pub(super) fn check_mesh(options: &MeshOptions, dram: Option<Size>) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(IpPort(listen)) = options.listen {
        found.extend(ports(listen, !options.nics.is_empty()));
    }
    found.extend(options.peer.iter().map(|name| peer(name, &System)));
    if options.cert.is_some() || options.key.is_some() || options.ca.is_some() || options.cert_name.is_some()
    {
        found.push(certificates(options));
    }
    found.extend(options.nics.iter().map(nic));
    if !options.nics.is_empty() {
        let pools = dram.map(|dram| dram.as_bytes().saturating_mul(options.nics.len() as u64));
        let limit = getrlimit(Resource::Memlock).current.filter(|_| !may_lock_all());
        found.push(memlock(limit, pools));
    }
    found
}

/// An error with the remedy at its end.
fn refused(check: &str, error: &impl Display) -> Finding {
    let text = error.to_string();
    let (text, remedy) =
        text.rsplit_once(": ").unwrap_or((&text, "pass the mesh options as pillion serve takes them"));
    Finding::bad(FindingLevel::Fail, check, text, remedy)
}

// === addresses ===

/// Checks the ports of a sidecar with this address.
fn ports(listen: SocketAddr, nics: bool) -> Vec<Finding> {
    if listen.ip().is_unspecified() {
        return vec![refused("mesh-listen", &::mesh::MeshError::Unreachable(listen))];
    }
    let (mut at, mut found) = (listen, vec![port(listen, "the inventory of blocks")]);
    for what in ["fetching blocks over TCP", "arranging RDMA"].into_iter().take(1 + usize::from(nics)) {
        match next_port(at) {
            Ok(next) => at = next,
            Err(error) => return vec![refused("mesh-listen", &error)],
        }
        found.push(port(at, what));
    }
    found
}

fn port(at: SocketAddr, what: &str) -> Finding {
    let bad = |level, text: String, remedy: &str| Finding::bad(level, "mesh-listen", text, remedy);
    match TcpListener::bind(at).map_err(|error| (error.kind(), error)) {
        Ok(_) => Finding::ok("mesh-listen", format!("{at} is free, for {what}")),
        Err((ErrorKind::AddrNotAvailable, _)) => {
            let text = format!("{} is not an address of this host", at.ip());
            bad(FindingLevel::Fail, text, "pass one at which peers reach it, such as the pod's IP")
        }
        Err((ErrorKind::AddrInUse, _)) => {
            let text = format!("{at}, for {what}, is in use");
            bad(FindingLevel::Warn, text, "a running sidecar may use it; otherwise pass another port")
        }
        Err((_, error)) => {
            let text = format!("the sidecar cannot listen at {at}, for {what}: {error}");
            bad(FindingLevel::Fail, text, "pass another port, above 1023")
        }
    }
}

// === peers ===

/// Checks that a --peer has an address.
fn peer(name: &str, resolver: &dyn Resolve) -> Finding {
    if let Err(error) = mesh::control::check_peer(name) {
        return refused("peer", &error);
    }
    let why = match resolver.resolve(name) {
        Ok(addresses) if !addresses.is_empty() => {
            return Finding::ok("peer", format!("{name} resolves to {} addresses", addresses.len()));
        }
        Ok(_) => "it has no address".into(),
        Err(error) => error.to_string(),
    };
    let remedy = "create the headless Service of that name, with publishNotReadyAddresses, or correct --peer";
    Finding::bad(FindingLevel::Fail, "peer", format!("{name} does not resolve here: {why}"), remedy)
}

// === certificates ===

fn certificates(options: &MeshOptions) -> Finding {
    let tls = match options.security() {
        Err(error) => return refused("mesh-cert", &error),
        Ok(Security::Tls(tls)) => tls,
        Ok(Security::Plaintext) => unreachable!("with certificates plaintext is an error"),
    };
    match tls.check_files() {
        Err(error) => refused("mesh-cert", &error),
        Ok(()) => {
            let text = format!("peers with the same CA and name accept {}", tls.certificate.display());
            Finding::ok("mesh-cert", text)
        }
    }
}

// === NICs ===

fn nic(name: &String) -> Finding {
    match rdma::check_nics(std::slice::from_ref(name)) {
        Ok(()) => Finding::ok("nics", format!("{name} is usable: {}", describe_place(Path::new(NICS), name))),
        Err(error) => {
            let remedy =
                "pass an existing NIC with an active port, and let the container see /dev/infiniband";
            Finding::bad(FindingLevel::Fail, "nics", error.to_string(), remedy)
        }
    }
}

/// The kind of a NIC's network, and its NUMA node.
fn describe_place(nics: &Path, name: &str) -> String {
    let read = |file: &str| {
        let text = std::fs::read_to_string(nics.join(name).join(file)).unwrap_or_default();
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let link = read("ports/1/link_layer").unwrap_or_else(|| "unknown link layer".into());
    // The kernel's value for a machine with one node is -1.
    match read("device/numa_node").filter(|node| node != "-1") {
        Some(node) => format!("{link}, NUMA node {node}"),
        None => format!("{link}, of no NUMA node in particular"),
    }
}

/// Returns true if limits of locked memory do not apply to this process.
fn may_lock_all() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    effective >> IPC_LOCK & 1 == 1
}

/// Checks the limit of locked memory. Every NIC registers the whole pool, and the kernel counts each
/// registration.
fn memlock(limit: Option<u64>, pools: Option<u64>) -> Finding {
    let Some(limit) = limit else {
        return Finding::ok("nics-memlock", "memory that NICs register is not limited");
    };
    let may = format!("{} MiB may be locked", limit / MIB);
    let raise = "raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of systemd, or the \
                 capability IPC_LOCK";
    match pools {
        Some(pools) if pools <= limit => Finding::ok("nics-memlock", format!("{may}, enough for the pool")),
        Some(pools) => {
            let text = format!("only {may}, and each NIC registers the pool, {} MiB in all", pools / MIB);
            Finding::bad(FindingLevel::Fail, "nics-memlock", text, raise)
        }
        None => {
            let text = format!("{may}; whether the NICs can register the pool depends on its size");
            Finding::bad(FindingLevel::Warn, "nics-memlock", text, "pass --dram SIZE, as to pillion serve")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::path::PathBuf;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

    use super::*;

    fn one(options: &MeshOptions) -> Finding {
        let found = check_mesh(options, None);
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap()
    }

    fn listen(text: &str) -> MeshOptions {
        MeshOptions { listen: Some(text.parse().unwrap()), ..MeshOptions::default() }
    }

    #[test]
    fn nothing_is_said_of_a_mesh_that_is_not_asked_for() {
        assert!(check_mesh(&MeshOptions::default(), None).is_empty());
    }

    #[test]
    fn an_address_is_of_this_host_and_its_ports_are_free() {
        // A loopback address of this process alone.
        let ip = Ipv4Addr::from(127 << 24 | std::process::id() & 0x00ff_ffff);
        let at = |port| SocketAddr::new(ip.into(), port);
        let levels = |found: &[Finding]| found.iter().map(|finding| finding.level).collect::<Vec<_>>();
        let [ok, warn] = [FindingLevel::Ok, FindingLevel::Warn];
        assert_eq!(levels(&check_mesh(&listen(&at(17_411).to_string()), None)), [ok, ok]);
        let _taken = TcpListener::bind(at(17_413)).unwrap();
        assert_eq!(levels(&ports(at(17_411), true)), [ok, ok, warn]);
        assert_eq!(levels(&ports(at(17_412), false)), [ok, warn]);
        let far = check_mesh(&listen("192.0.2.1:9441"), None);
        assert!(
            far[0].level == FindingLevel::Fail && far[0].text.contains("not an address of this host"),
            "{far:?}"
        );
        let all = one(&listen("0.0.0.0:9441"));
        assert!(all.remedy.as_ref().is_some_and(|remedy| remedy.contains("the pod's IP")), "{all:?}");
        let last = one(&listen(&at(65_535).to_string()));
        assert!(last.remedy.as_ref().is_some_and(|remedy| remedy.contains("lower port")), "{last:?}");
    }

    /// A resolver with the name `pods` alone.
    #[derive(Debug)]
    struct Names;

    impl Resolve for Names {
        fn resolve(&self, name: &str) -> std::io::Result<Vec<SocketAddr>> {
            let known = name == "pods:9441";
            if known {
                Ok(vec!["10.0.0.1:9441".parse().unwrap()])
            } else {
                Err(std::io::Error::other("unknown"))
            }
        }
    }

    #[test]
    fn a_peer_is_a_name_that_resolves() {
        assert_eq!(peer("pods:9441", &Names).level, FindingLevel::Ok);
        let mistyped = peer("pod:9441", &Names);
        assert!(
            mistyped.level == FindingLevel::Fail && mistyped.text.contains("pod:9441 does not"),
            "{mistyped:?}"
        );
        assert!(
            mistyped.remedy.is_some_and(|remedy| remedy.contains("Service") && remedy.contains("--peer"))
        );
        assert_eq!(peer("pods", &Names).level, FindingLevel::Fail, "without a port");
        let options = MeshOptions { peer: vec!["127.0.0.1:9441".into()], ..MeshOptions::default() };
        assert_eq!(one(&options).level, FindingLevel::Ok);
    }

    /// A node's files in `folder`: a certificate for `name`, valid until `year`.
    fn files(folder: &Path, name: &str, year: i32) -> MeshOptions {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(year, 1, 1));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        let file = |name: &str, text: &str| -> Option<PathBuf> {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        MeshOptions {
            cert: file("tls.crt", &certificate),
            key: file("tls.key", &key.serialize_pem()),
            ca: file("ca.crt", &authority),
            cert_name: Some("mesh".into()),
            ..MeshOptions::default()
        }
    }

    #[test]
    fn certificates_are_those_that_a_peer_accepts() {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let good = files(folders[0].path(), "mesh", 2099);
        assert_eq!(one(&good).level, FindingLevel::Ok, "{:?}", one(&good));
        let bad = |options: MeshOptions, text: &str, remedy: &str| {
            let found = one(&options);
            assert_eq!(found.level, FindingLevel::Fail);
            assert!(
                found.text.contains(text) && found.remedy.as_ref().unwrap().contains(remedy),
                "{found:?}"
            );
        };
        bad(MeshOptions { key: None, ..good.clone() }, "lacks --mesh-key", "pass it too");
        bad(MeshOptions { ca: Some("/none".into()), ..good.clone() }, "/none", "may read");
        bad(
            MeshOptions { cert_name: Some("other".into()), ..good.clone() },
            "not valid for name",
            "agreed name",
        );
        let other = files(folders[1].path(), "mesh", 2099);
        bad(MeshOptions { key: other.key.clone(), ..good.clone() }, "does not belong to", "of one node");
        bad(MeshOptions { ca: other.ca.clone(), ..good }, "would not be accepted", "of one CA");
        bad(files(folders[1].path(), "mesh", 2021), "expired", "unexpired");
    }

    #[test]
    fn a_nic_is_one_of_this_host() {
        let options = MeshOptions { nics: vec!["nic9".into()], ..MeshOptions::default() };
        let found = check_mesh(&options, Some(Size::new(1)));
        assert_eq!((found.len(), found[0].level), (2, FindingLevel::Fail), "{found:?}");
        assert!(found[0].text.contains("'nic9'") && found[0].remedy.is_some(), "{found:?}");
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in [("ports/1/link_layer", "InfiniBand\n"), ("device/numa_node", "1\n")] {
            let path = folder.path().join("a").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(describe_place(folder.path(), "a"), "InfiniBand, NUMA node 1");
        std::fs::write(folder.path().join("a/device/numa_node"), "-1\n").unwrap();
        assert!(describe_place(folder.path(), "a").ends_with("no NUMA node in particular"));
    }

    #[test]
    fn every_nic_must_be_allowed_to_lock_the_pool() {
        assert_eq!(memlock(None, Some(u64::MAX)).level, FindingLevel::Ok);
        assert_eq!(memlock(Some(2 * MIB), Some(2 * MIB)).level, FindingLevel::Ok);
        let short = memlock(Some(2 * MIB), Some(3 * MIB));
        assert!(short.level == FindingLevel::Fail && short.remedy.unwrap().contains("ulimit -l"));
        assert!(memlock(Some(MIB), None).remedy.unwrap().contains("--dram"));
    }
}
