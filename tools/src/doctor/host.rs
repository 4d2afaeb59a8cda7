//! This host, or this container, as a place for a sidecar and an engine.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use copy_engine::cuda::{self, CudaError, Gpu};
use io_uring::IoUring;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use shm_protocol::handshake::{self, Hello, PROBE_RUN, Reply, Role};
use shm_protocol::transport;

use super::mesh::NICS;
use super::{Finding, FindingLevel};
use crate::ctl::FROZEN;

/// The least version for batched copies; see docs/decisions/0007.
const DRIVER_MIN: i32 = 12_080;
/// The KV cache of a small model on the CPU; docker's default is 64 MiB.
const SHM_BYTES_MIN: u64 = 1 << 30;
/// Below this, registered buffers of a disk or a network card find no room.
const MEMLOCK_BYTES_MIN: u64 = 64 << 20;
/// A living sidecar accepts at once.
const PROBE_TIME_MAX: Duration = Duration::from_secs(1);
/// A running data thread answers within milliseconds.
const ANSWER_TIME_MAX: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
const MIB: u64 = 1 << 20;
const SHM: &str = "/dev/shm";
/// The name of the check of a sidecar's answer.
pub(super) const SIDECAR: &str = "sidecar";

/// Runs all checks; `socket` is the path of a sidecar's socket.
pub(super) fn check_host(socket: &Path) -> Vec<Finding> {
    let mut found = gpus();
    found.extend([pid_namespace(), shm(), memlock(), hugepages(), io_uring(), rdma()]);
    found.push(sidecar(socket));
    found
}

fn gpus() -> Vec<Finding> {
    if !cuda::is_present() {
        let text = "libcuda cannot be opened or finds no GPU: only engines on the CPU are served";
        let remedy = "on a GPU host, give the container the GPUs and the driver's libraries (NVIDIA container toolkit)";
        return vec![Finding::bad(FindingLevel::Warn, "gpu", text, remedy)];
    }
    let version = cuda::driver_version().unwrap_or(0);
    let text = format!("the driver supports CUDA {}.{}", version / 1000, version % 1000 / 10);
    let driver = match version >= DRIVER_MIN {
        true => Finding::ok("driver", text),
        false => Finding::bad(
            FindingLevel::Fail,
            "driver",
            text,
            "install a driver of branch 570 or later: CUDA 12.8",
        ),
    };
    let remedy = "check its compute mode (nvidia-smi -c DEFAULT ends exclusive mode) and its free memory";
    let unusable = |error: CudaError| {
        Finding::bad(FindingLevel::Fail, "gpu", format!("a GPU cannot be used: {error}"), remedy)
    };
    let seen = match Gpu::all() {
        Err(error) => return vec![driver, unusable(error)],
        Ok(seen) => seen,
    };
    let mut findings = vec![driver];
    for gpu in seen {
        match gpu {
            Err(error) => findings.push(unusable(error)),
            Ok(gpu) => {
                findings.push(Finding::ok("gpu", format!("{} is usable", uuid(gpu.uuid()))));
                findings.push(ipc(&gpu));
            }
        }
    }
    findings
}

/// A UUID in the form of nvidia-smi -L.
fn uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn ipc(gpu: &Gpu) -> Finding {
    let name = uuid(gpu.uuid());
    match gpu.try_export() {
        Ok(()) => Finding::ok("cuda_ipc", format!("memory of {name} can be shared with another process")),
        Err(error) => {
            let text = format!("memory of {name} cannot be shared with another process: {error}");
            let remedy = "engines on this GPU run without the cache: use Linux without WSL, vGPU or MIG limits on CUDA \
                 IPC";
            Finding::bad(FindingLevel::Fail, "cuda_ipc", text, remedy)
        }
    }
}

fn pid_namespace() -> Finding {
    let pid = std::process::id();
    let space =
        std::fs::read_link("/proc/self/ns/pid").map_or("unknown".into(), |link| link.display().to_string());
    let text = format!("this is process {pid} of {space}");
    if pid != 1 {
        return Finding::ok("pid", text);
    }
    let remedy = "an engine that is process 1 of its own container cannot share GPU memory with it: let pillion serve \
         be the container's command, since it runs below process 1 by itself";
    Finding::bad(FindingLevel::Warn, "pid", text, remedy)
}

fn shm() -> Finding {
    let Ok(room) = rustix::fs::statvfs(SHM) else {
        let text = format!("{SHM} cannot be examined");
        return Finding::bad(
            FindingLevel::Warn,
            "shm",
            text,
            "mount a tmpfs there: engines on the CPU keep their KV in it",
        );
    };
    let (size, free) = (room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize);
    let text = format!("{SHM} has {} MiB, {} of them free", size / MIB, free / MIB);
    if size >= SHM_BYTES_MIN {
        return Finding::ok("shm", text);
    }
    let remedy = "enlarge it to hold the KV cache of an engine on the CPU: volumes: [{name: shm, emptyDir: {medium: \
         Memory}}] mounted at /dev/shm, or docker run --shm-size";
    Finding::bad(FindingLevel::Warn, "shm", text, remedy)
}

fn memlock() -> Finding {
    match getrlimit(Resource::Memlock).maximum {
        None => Finding::ok("memlock", "locked memory is not limited"),
        Some(bytes) if bytes >= MEMLOCK_BYTES_MIN => {
            Finding::ok("memlock", format!("{} MiB may be locked", bytes / MIB))
        }
        Some(bytes) => {
            let text = format!("only {} KiB may be locked", bytes / 1024);
            let remedy = "raise it where disks or network cards register memory: ulimit -l unlimited, docker run --ulimit memlock=-1, \
                          LimitMEMLOCK=infinity of systemd";
            Finding::bad(FindingLevel::Warn, "memlock", text, remedy)
        }
    }
}

fn hugepages() -> Finding {
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let figure = |name: &str| -> u64 {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    let (total, free, kib) = (figure("HugePages_Total"), figure("HugePages_Free"), figure("Hugepagesize"));
    Finding::ok("hugepages", format!("{total} huge pages of {kib} KiB are reserved, {free} of them free"))
}

fn io_uring() -> Finding {
    match IoUring::new(2) {
        Ok(_) => Finding::ok("io_uring", "io_uring is allowed"),
        Err(error) => {
            let text = format!(
                "io_uring is refused ({error}): threads read and write disks, which costs more CPU time"
            );
            let remedy = "let the seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register, and set \
                 sysctl kernel.io_uring_disabled=0";
            Finding::bad(FindingLevel::Warn, "io_uring", text, remedy)
        }
    }
}

fn rdma() -> Finding {
    let entries = std::fs::read_dir(NICS).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match names.is_empty() {
        true => Finding::ok("rdma", "no RDMA device"),
        false => Finding::ok("rdma", format!("RDMA devices: {}", names.join(", "))),
    }
}

/// Checks that a sidecar answers a hello on its socket.
fn sidecar(path: &Path) -> Finding {
    match transport::connect_socket(path, PROBE_TIME_MAX) {
        Ok(socket) => greet(&socket, &path.display().to_string()),
        Err(errno) => explain_unreached(path, errno),
    }
}

/// The reason of a failed connection to a sidecar's socket.
pub(crate) fn explain_unreached(path: &Path, errno: Errno) -> Finding {
    let shown = path.display();
    let bad = |level, text, remedy| Finding::bad(level, SIDECAR, text, remedy);
    match errno {
        Errno::NOENT | Errno::CONNREFUSED => {
            let remedy = format!(
                "start one with pillion serve --socket {shown}, and mount its folder into both containers"
            );
            bad(FindingLevel::Warn, format!("no sidecar answers on {shown}"), remedy)
        }
        Errno::ACCESS | Errno::PERM => {
            let remedy =
                "run this as the sidecar's user, or give pillion serve a --socket-group of this user";
            bad(FindingLevel::Fail, format!("this user may not connect to {shown}"), remedy.into())
        }
        Errno::AGAIN => bad(
            FindingLevel::Fail,
            format!("a sidecar listens on {shown} and accepts no connection"),
            FROZEN.into(),
        ),
        error => {
            let remedy = "another program may own this socket: pass another --socket PATH to both sides";
            bad(FindingLevel::Fail, format!("{shown} cannot be connected to: {error}"), remedy.into())
        }
    }
}

/// Sends a probe's hello, and waits for the answer: the kernel accepts connections for a hung data thread
/// too. `None` without an answer; the reply is `None` if this release does not know it.
pub(crate) fn send_probe(socket: &OwnedFd, engine: &str) -> Option<(Option<Reply>, Vec<OwnedFd>)> {
    let hello = Hello::new(engine.into(), 1, Role::Scheduler { run: PROBE_RUN });
    let hello = handshake::encode_hello(&hello, 0).expect("a hello within its rules");
    let sent = transport::send_record(socket, &hello, &[]);
    let mut ready = [PollFd::new(socket, PollFlags::IN)];
    let answered = sent.and_then(|()| rustix::event::poll(&mut ready, Some(&ANSWER_TIME_MAX)));
    matches!(answered, Ok(1..)).then(|| {
        let (record, descriptors) = transport::receive_record(socket).unwrap_or_default();
        (handshake::decode_reply(&record).ok(), descriptors)
    })
}

fn greet(socket: &OwnedFd, shown: &str) -> Finding {
    let bad = |text, remedy: &str| Finding::bad(FindingLevel::Fail, SIDECAR, text, remedy);
    let restart = "its data thread is stuck: look at its log and restart it";
    let Some((reply, _)) = send_probe(socket, "pillion doctor") else {
        return bad(format!("a sidecar listens on {shown} and does not answer"), restart);
    };
    match reply {
        Some(Reply::Welcome(welcome)) => {
            Finding::ok(SIDECAR, format!("a sidecar of release {} answers on {shown}", welcome.release))
        }
        Some(Reply::Refused { reason, .. }) => bad(
            format!("the sidecar on {shown} refuses engines of this release: {reason}"),
            "use the same release on both sides",
        ),
        None => bad(
            format!("{shown} does not answer like a sidecar that this release knows"),
            "pass another --socket PATH",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_is_found_where_it_listens_and_only_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.sock");
        let absent = sidecar(&path);
        assert!(
            absent.level == FindingLevel::Warn && absent.remedy.unwrap().contains("pillion serve --socket")
        );
        let listener = transport::listen_at(&path).unwrap();
        let mute = sidecar(&path);
        assert!(mute.level == FindingLevel::Fail && mute.text.contains("does not answer"), "{mute:?}");
        drop(listener);
        assert_eq!(sidecar(&path).level, FindingLevel::Warn, "a dead one's socket");
        let _other = std::os::unix::net::UnixListener::bind(folder.path().join("other")).unwrap();
        assert_eq!(sidecar(&folder.path().join("other")).level, FindingLevel::Fail, "of another kind");
        let forbidden = explain_unreached(&path, Errno::ACCESS);
        assert!(forbidden.text.contains("this user may not connect"), "{forbidden:?}");
    }

    #[test]
    fn a_gpu_is_named_as_nvidia_smi_does() {
        let bytes = std::array::from_fn(|index| index as u8 * 17);
        assert_eq!(uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn every_finding_that_is_not_ok_has_a_remedy() {
        let found = check_host(Path::new("/nonexistent/p.sock"));
        for check in ["pid", "shm", "memlock", "hugepages", "io_uring", "rdma", "sidecar"] {
            assert!(found.iter().any(|finding| finding.check == check), "{check} in {found:?}");
        }
        assert!(found.iter().all(|finding| (finding.level == FindingLevel::Ok) == finding.remedy.is_none()));
    }
}
