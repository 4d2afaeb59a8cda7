//! The fact `weights`: a digest of the weight files. It covers sampled pages of each file, so a start does
//! not read whole files.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Pages read of each file, evenly spaced.
const SAMPLED_PAGES: u64 = 64;
const PAGE_BYTES: u64 = 4096;
const SUFFIX: &str = ".safetensors";

/// Returns 64 hex digits; `None` if the directory has no safetensors files.
pub fn digest(directory: &Path) -> io::Result<Option<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if name(&path).ends_with(SUFFIX) {
            files.push(path);
        }
    }
    files.sort_unstable_by(|one, other| name(one).cmp(name(other)));
    let mut hasher = Sha256::new();
    for path in &files {
        add(&mut hasher, path)?;
    }
    Ok((!files.is_empty()).then(|| hex::encode(hasher.finalize())))
}

/// Adds a file's name, length, the length of its safetensors header, that header, and its pages.
fn add(hasher: &mut Sha256, path: &PathBuf) -> io::Result<()> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix)?;
    let header = read(&mut file, u64::from_le_bytes(prefix).min(size))?;
    hasher.update(format!("{} {size} {}", name(path), header.len()));
    hasher.update(header);
    for page in 0..SAMPLED_PAGES {
        file.seek(SeekFrom::Start(page * size.saturating_sub(PAGE_BYTES) / (SAMPLED_PAGES - 1)))?;
        hasher.update(read(&mut file, PAGE_BYTES)?);
    }
    Ok(())
}

fn read(file: &mut File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the file's name, or an empty text for a name outside of UTF-8, since weight files have no such
/// names.
fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lengths_headers_and_pages_count() {
        let directory = std::env::temp_dir().join(format!("pillion-weight-files-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a new directory");
        assert_eq!(digest(&directory).expect("readable"), None, "no weights");
        let path = directory.join("model.safetensors");
        let mut bytes: Vec<u8> = (0..300_000_u32).map(|at| (at * 7 % 251) as u8).collect();
        bytes[..8].copy_from_slice(&16_u64.to_le_bytes());
        fs::write(&path, &bytes).expect("room");
        fs::write(directory.join("config.json"), "{}").expect("room");
        let known = digest(&directory).expect("readable");
        // The digest made by Python's hashlib, by the recipe of PROTOCOL.md.
        assert_eq!(
            known.as_deref(),
            Some("7f5f9da531b4bfe2db32ecd1b1e3d323868459c33ed2ffbf8c2b742fb33173cd")
        );
        for at in [8, 23, 24, 299_999] {
            bytes[at] ^= 1;
            fs::write(&path, &bytes).expect("room");
            assert_ne!(digest(&directory).expect("readable"), known, "byte {at}");
            bytes[at] ^= 1;
        }
        fs::rename(&path, directory.join("other.safetensors")).expect("same directory");
        assert_ne!(digest(&directory).expect("readable"), known, "the name");
        fs::remove_dir_all(&directory).expect("made above");
    }
}
