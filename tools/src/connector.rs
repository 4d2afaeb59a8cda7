//! `pillion connector`: the connector for vLLM, copied from the sidecar's image into a folder on an engine's `PYTHONPATH`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

/// The unpacked wheel in the image.
const PACKED: &str = "/usr/share/pillion/python";

/// Options of `pillion connector`.
#[derive(Args, Debug)]
pub struct ConnectorOptions {
    /// Folder to copy the connector into
    #[arg(long, value_name = "FOLDER")]
    pub into: PathBuf,
    /// Folder of the unpacked wheel
    #[arg(long, value_name = "FOLDER", default_value = PACKED)]
    pub from: PathBuf,
}

/// Copies the connector, and returns a text with the folder.
pub fn copy_connector(options: &ConnectorOptions) -> anyhow::Result<String> {
    let ConnectorOptions { from, into } = options;
    if !from.join("pillion").is_dir() {
        bail!(
            "{} has no connector: run this in the sidecar's image, or name an unpacked wheel by --from",
            from.display()
        );
    }
    copy_folder(from, into)?;
    Ok(format!("the connector is in {}: put it on the engine's PYTHONPATH", into.display()))
}

/// Copies a folder's files. Each file is replaced as a whole: an engine may have an older one mapped.
fn copy_folder(from: &Path, into: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(into).with_context(|| format!("cannot make {}", into.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = into.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            let part = into.join(format!(".{}.part", entry.file_name().display()));
            let copied = fs::copy(entry.path(), &part).and_then(|_| fs::rename(&part, &target));
            copied.with_context(|| format!("cannot write {}", target.display()))?;
        }
    }
    Ok(())
}
