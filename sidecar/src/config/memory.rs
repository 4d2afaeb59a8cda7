//! Checks the pool's size against the memory limits of this process's control groups.

use std::path::{Path, PathBuf};

use super::{ConfigError, ServeConfig, Size};

/// Memory beside the pool, the mesh's directory and the disks' index: the DRAM index, session memory, stacks.
const PROCESS_BYTES: u64 = 64 << 20;
/// Bytes of index memory for a block on a disk, measured.
const INDEX_BYTES: u64 = 100;
/// Bytes of a common model's block: the sidecar knows no model at its start.
const BLOCK_BYTES: u64 = 2 << 20;
/// Memory beside the pool with a GPU: its driver, and room for more blocks than counted above.
const BESIDE_WITH_GPU_BYTES: u64 = 2 << 30;
/// Requests for scores that are read at once, each with its tokens and keys.
const SCORES_BYTES: u64 = 64 << 20;
/// Bytes of the pool before its first segment.
const HEADER_BYTES: u64 = shm_protocol::pool::SEGMENT_ALIGN;
const MIB: u64 = 1 << 20;
const CGROUPS: &str = "/sys/fs/cgroup";

/// A kind of memory limited by control groups.
struct Kind {
    /// The controller's name, in version 1.
    controller: &'static str,
    /// The file with the limit, in version 1 and in version 2.
    files: [&'static str; 2],
}

const MEMORY: Kind = Kind { controller: "memory", files: ["memory.limit_in_bytes", "memory.max"] };
/// Usually not part of the memory limit: in Kubernetes the resource hugepages-2Mi sets it.
const HUGE_PAGES: Kind =
    Kind { controller: "hugetlb", files: ["hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.max"] };

/// Refuses a pool beyond the limit: the kernel would kill this process.
pub(super) fn check_memory(config: &ServeConfig) -> Result<(), ConfigError> {
    let Ok(groups) = std::fs::read_to_string("/proc/self/cgroup") else { return Ok(()) };
    let (kind, beside) = if config.hugepages { (HUGE_PAGES, HEADER_BYTES) } else { (MEMORY, beside(config)) };
    let Some((limit, place)) = limit(&groups, &kind) else { return Ok(()) };
    within(limit, place, config.dram, beside)
}

/// Memory beside the pool, estimated from the options with blocks of a common model's size on the disks.
fn beside(config: &ServeConfig) -> u64 {
    let directory = config.mesh.as_ref().map_or(0, |mesh| mesh.directory_bytes as u64);
    let disks: u64 = config.ssd.iter().map(|disk| disk.size.as_bytes()).sum();
    let scores = if config.control.score.is_some() { SCORES_BYTES } else { 0 };
    PROCESS_BYTES + directory + disks / BLOCK_BYTES * INDEX_BYTES + scores
}

/// A warning for a sidecar with a GPU, if the limit leaves less beside the pool than its driver may take.
pub(super) fn too_little_for_gpu(config: &ServeConfig) -> Option<String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let (limit, place) = limit(&groups, &MEMORY)?;
    // Huge pages do not count to this limit.
    let pool = if config.hugepages { 0 } else { config.dram.as_bytes() };
    short_of(limit, &place, pool)
}

fn short_of(limit: u64, place: &str, pool: u64) -> Option<String> {
    let wanted = pool.saturating_add(BESIDE_WITH_GPU_BYTES);
    (limit < wanted).then(|| {
        format!(
            "the limit set by {place} is {} MiB, and with a GPU the pool and {} beside it need {} MiB: raise that limit, or the \
             kernel may end this container",
            limit / MIB,
            Size::new(BESIDE_WITH_GPU_BYTES),
            wanted / MIB
        )
    })
}

/// Fails if the pool and the memory beside it exceed a limit.
fn within(limit: u64, place: String, dram: Size, beside: u64) -> Result<(), ConfigError> {
    let needed = dram.as_bytes().saturating_add(beside);
    if needed <= limit {
        return Ok(());
    }
    let (needed_mib, limit_mib) = (needed.div_ceil(MIB), limit / MIB);
    Err(ConfigError::MemoryLimit { dram, beside: Size::new(beside), needed_mib, limit_mib, place })
}

/// The lowest limit of this process's control groups, and its file.
fn limit(groups: &str, kind: &Kind) -> Option<(u64, String)> {
    files(groups, kind)
        .into_iter()
        .filter_map(|file| Some((read_limit(&file)?, file.display().to_string())))
        .min()
}

/// Files of possible limits, from the text of `/proc/self/cgroup`; in a container some of them do not exist.
fn files(text: &str, kind: &Kind) -> Vec<PathBuf> {
    let Kind { controller, files: [apart, common] } = kind;
    let mut files = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => (PathBuf::from(CGROUPS), common),
            list if list.split(',').any(|name| name == *controller) => {
                (Path::new(CGROUPS).join(controller), apart)
            }
            _ => continue,
        };
        let group = Path::new(group.trim_start_matches('/'));
        files.extend(group.ancestors().map(|folder| root.join(folder).join(file)));
    }
    files
}

/// The limit in a file; `None` if the file is absent or says "max".
fn read_limit(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeOptions;

    #[test]
    fn a_pool_as_large_as_the_limit_is_refused_with_what_it_needs() {
        let (gib, place) = (1 << 30, || "/sys/fs/cgroup/memory.max".to_owned());
        let dram: Size = "30GiB".parse().unwrap();
        assert!(within(30 * gib + PROCESS_BYTES, place(), dram, PROCESS_BYTES).is_ok());
        let text = within(30 * gib, place(), dram, PROCESS_BYTES).unwrap_err().to_string();
        assert!(text.contains("needs 30784 MiB, of which 64.0 MiB are beside"), "{text}");
        assert!(text.contains("memory.max is 30720 MiB"), "{text}");
    }

    #[test]
    fn a_mesh_and_disks_need_memory_beside_the_pool() {
        let beside = |more: &str| {
            let text = format!("dram = \"4MiB\"\n{more}");
            beside(&toml::from_str::<ServeOptions>(&text).unwrap().complete().unwrap())
        };
        assert_eq!(beside(""), 64 << 20);
        assert_eq!(beside("ssd = [\"/a:300GiB\", \"/b:100GiB\"]"), (64 << 20) + 200 * 1024 * 100);
        let mesh = "[mesh]\nlisten = \"10.0.0.1:9441\"\npeer = [\"b:9441\"]\nplaintext = true\n";
        assert_eq!(beside(mesh), (64 + 512) << 20);
        assert_eq!(beside(&format!("{mesh}directory-size = \"1GiB\"")), (64 + 1024) << 20);
    }

    #[test]
    fn less_than_two_gib_beside_the_pool_is_warned_of_with_a_gpu() {
        let place = "/sys/fs/cgroup/memory.max";
        assert_eq!(short_of(32 << 30, place, 30 << 30), None);
        let text = short_of((32 << 30) - 1, place, 30 << 30).unwrap();
        assert!(
            text.contains("need 32768 MiB: raise that limit, or the kernel may end") && text.contains(place),
            "{text}"
        );
    }

    #[test]
    fn every_ancestor_of_both_versions_is_asked() {
        let names = |text: &str, kind| {
            files(text, kind).iter().map(|file| file.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            names("0::/kube/pod\n", &MEMORY),
            [
                "/sys/fs/cgroup/kube/pod/memory.max",
                "/sys/fs/cgroup/kube/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert_eq!(
            names("5:cpu,memory:/a\n3:pids:/b\nnonsense", &MEMORY),
            ["/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        );
        assert_eq!(
            names("2:hugetlb:/\n0::/", &HUGE_PAGES),
            ["/sys/fs/cgroup/hugetlb/hugetlb.2MB.limit_in_bytes", "/sys/fs/cgroup/hugetlb.2MB.max"]
        );
    }
}
