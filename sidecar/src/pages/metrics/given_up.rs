//! Files of earlier sidecars whose blocks were all dropped at the start.

use prometheus::Registry;
use tiers::given_up::GivenUpCause;

use super::figures::register_counters;

const HELP: &str = "Files of earlier sidecars that start empty, by file (pool, or log of a disk) and reason. boot: \
     written before the last reboot; damaged: the header is not intact; sizes: made for other sizes; unfinished: the \
     earlier sidecar ended before the file was whole, or memory was taken from it since; version: its release is too \
     far from this one.";

shm_protocol::named! {
    /// The use of a file.
    pub enum GivenUpFile {
        Pool = "pool",
        Ssd = "ssd",
    }
}

/// Registers and counts the files; all are known at the start.
pub fn count_given_up(
    registry: &Registry,
    given_up: impl Iterator<Item = (GivenUpFile, GivenUpCause)>,
) -> Result<(), prometheus::Error> {
    let files = register_counters(registry, "files_given_up_total", HELP, &["file", "reason"])?;
    for file in GivenUpFile::ALL {
        GivenUpCause::ALL
            .iter()
            .for_each(|cause| files.with_label_values(&[file.name(), cause.name()]).inc_by(0));
    }
    given_up.for_each(|(file, cause)| files.with_label_values(&[file.name(), cause.name()]).inc());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_there_and_each_file_is_counted() {
        let registry = Registry::new();
        let given_up = [
            (GivenUpFile::Ssd, GivenUpCause::Version),
            (GivenUpFile::Pool, GivenUpCause::Sizes),
            (GivenUpFile::Ssd, GivenUpCause::Version),
        ];
        count_given_up(&registry, given_up.into_iter()).unwrap();
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "pillion_files_given_up_total{file=\"ssd\",reason=\"version\"} 2",
            "pillion_files_given_up_total{file=\"pool\",reason=\"sizes\"} 1",
            "pillion_files_given_up_total{file=\"pool\",reason=\"version\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
