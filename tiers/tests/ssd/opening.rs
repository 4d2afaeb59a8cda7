//! Accepted devices, and refusals before any write.

use std::fs;
use std::os::unix::fs::FileExt;

use tiers::ssd::{Missing, Opened};

use crate::rig::{Folder, LOG_BYTES, Plan, Rig};

fn refusal(path: &std::path::Path, bytes: u64) -> String {
    Opened::open(path, bytes, Missing::Create).unwrap_err().to_string()
}

#[test]
fn a_folder_gets_a_file_and_sizes_are_checked() {
    let folder = Folder::new("folder");
    let text = refusal(&folder.0, LOG_BYTES - 1);
    assert!(text.contains("--ssd") && text.contains("the least is") && text.contains("raise"), "{text}");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0, "nothing was made");
    let opened = Opened::open(&folder.0, LOG_BYTES, Missing::Create).unwrap();
    assert_eq!(opened.geometry().segments, 4);
    assert_eq!(fs::metadata(folder.0.join("pillion.log")).unwrap().len(), LOG_BYTES);
    let text = refusal(&folder.0.join("none/log"), LOG_BYTES);
    assert!(text.contains("is not a folder") && text.contains("mount the disk"), "{text}");
    let text = refusal(std::path::Path::new("/dev/null"), LOG_BYTES);
    assert!(text.contains("not a file, a folder"), "{text}");
}

#[test]
fn what_is_not_ours_is_not_written_over() {
    let folder = Folder::new("foreign");
    for text in [&b"precious"[..], &[1; 5000], b"P"] {
        fs::write(folder.file(), text).unwrap();
        if text == b"P" {
            // Too little to be anything else than a Pillion superblock, cut.
            assert!(Opened::open(&folder.file(), LOG_BYTES, Missing::Refuse).is_ok());
            continue;
        }
        let refused = refusal(&folder.file(), LOG_BYTES);
        assert!(refused.contains("not a log of Pillion") && refused.contains("wipefs"), "{refused}");
        assert_eq!(fs::read(folder.file()).unwrap(), text);
    }
    // A file system whose mark lies behind zeros.
    fs::write(folder.file(), [&[0; 65536][..], b"_BHRfS_M"].concat()).unwrap();
    assert!(refusal(&folder.file(), LOG_BYTES).contains("not a log of Pillion"));
}

#[test]
fn another_version_or_a_damaged_superblock_starts_empty_and_says_so() {
    let folder = Folder::new("version");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    // Version and oldest version, and the log's random number: one byte of that, for any value of it, becomes
    // another.
    let changes = [
        (16, &[9, 0, 0, 0, 9][..], "log of version 9 (release 0."),
        (16, &[9, 0, 0, 0, 4], "log of versions 4 to 9 (release 0."),
        (16, &[1], "log of version 1 (release not stated)"),
        (16, &[4], "damaged"),
        (24, &[], "damaged"),
        (511, &[1], "damaged"),
    ];
    for (at, bytes, said) in changes {
        let mut rig = Rig::new(&plan);
        rig.recover();
        assert!(rig.write(1, 4096));
        drop(rig);
        let file = fs::File::options().read(true).write(true).open(folder.file()).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        let another = [!byte[0]];
        file.write_all_at(if bytes.is_empty() { &another } else { bytes }, at).unwrap();
        let mut rig = Rig::new(&plan);
        rig.recover();
        assert!(
            rig.notes.iter().any(|note| note.contains(said) && note.contains("empty")),
            "{:?}",
            rig.notes
        );
        assert!(!rig.keeps(1) && rig.stats().blocks == 0);
    }
}

#[test]
fn a_log_may_grow_and_shrink() {
    let folder = Folder::new("sizes");
    let mut rig = Rig::new(&Plan::new(&folder.file(), LOG_BYTES));
    rig.recover();
    assert!((0..50).all(|number| rig.write(number, 65536)));
    drop(rig);
    for bytes in [LOG_BYTES + (20 << 20), LOG_BYTES] {
        let mut rig = Rig::new(&Plan::new(&folder.file(), bytes));
        rig.recover();
        assert!((0..50).all(|number| rig.read(number)));
        assert_eq!(u64::from(rig.stats().devices[0].segments), (bytes - (1 << 20)) >> 22);
    }
    assert_eq!(fs::metadata(folder.file()).unwrap().len(), LOG_BYTES);
}
