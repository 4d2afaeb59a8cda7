//! The memory that this process may use: the limits of its control groups.

use std::path::{Path, PathBuf};

use super::{Config, ConfigError, Size};

/// Memory that the sidecar needs beside the pool: index, session memory, stacks.
const BESIDE_POOL_BYTES: u64 = 64 << 20;

/// Refuses a pool that the kernel would kill this process for.
pub(super) fn check(config: &Config) -> Result<(), ConfigError> {
    let Some((limit, place)) = limit() else { return Ok(()) };
    let needed = config.dram.as_bytes().saturating_add(BESIDE_POOL_BYTES);
    if needed <= limit {
        return Ok(());
    }
    Err(ConfigError::MemoryLimit { dram: config.dram, limit: Size::new(limit), place })
}

/// The tightest limit of this process's control groups, and the file that sets it.
fn limit() -> Option<(u64, String)> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    files(&text).into_iter().filter_map(|file| Some((read(&file)?, file.display().to_string()))).min()
}

/// Files that may state a limit, by the text of `/proc/self/cgroup`; in a container some of them do not exist.
fn files(text: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = Path::new(group.trim_start_matches('/'));
        files.extend(group.ancestors().map(|folder| Path::new(root).join(folder).join(file)));
    }
    files
}

/// The limit in a file; none if it is absent or says "max".
fn read(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ancestor_of_both_versions_is_asked() {
        let names =
            |text: &str| files(text).iter().map(|file| file.display().to_string()).collect::<Vec<_>>();
        assert_eq!(
            names("0::/kube/pod\n"),
            [
                "/sys/fs/cgroup/kube/pod/memory.max",
                "/sys/fs/cgroup/kube/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        assert_eq!(
            names("5:cpu,memory:/a\n3:pids:/b\nnonsense"),
            ["/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        );
    }
}
