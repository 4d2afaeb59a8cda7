mod hugepages;

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use shm_protocol::key::BlockHash;
use shm_protocol::pool::PoolView;

use super::*;

const SEGMENT: u64 = 4 << 20;
const BLOCK: u64 = 10_000;

fn config(path: Option<PathBuf>) -> PoolConfig {
    PoolConfig { bytes: 2 * SEGMENT, segment_bytes: SEGMENT, path, hugepages: false, epoch: 42 }
}

/// A path on tmpfs, removed at the end.
struct TmpfsPath(PathBuf);

impl TmpfsPath {
    fn new(name: &str) -> Self {
        Self(PathBuf::from(format!("/dev/shm/pillion-test-{}-{name}", std::process::id())))
    }
}

impl Drop for TmpfsPath {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn key() -> BlockKey {
    BlockKey { namespace: 1, group: 3, hash: BlockHash(std::array::from_fn(|index| index as u8)) }
}

fn view(region: &Region) -> PoolView<impl Fn(usize) -> u64> {
    let load = |offset: usize| region.load64(offset);
    PoolView::new(load, region.len() as u64).expect("a sound header")
}

fn slot(generation: u64) -> SlotRef {
    let geometry = Geometry::new(SEGMENT, BLOCK).expect("fits");
    SlotRef { offset: geometry.offset(1, 7).expect("a slot"), generation }
}

/// One slot's life, seen through an engine's read-only mapping.
fn check_slot_life(pool: &Pool) {
    let engine = pool.read_only_fd().expect("opened");
    let region = Region::map(engine.as_fd(), pool.len() as usize, Access::ReadOnly).expect("mapped");
    let (view, slot) = (view(&region), slot(pool.first_generation()));
    let namespace = NamespaceDigest([9; 16]);
    assert!(!pool.fill(slot, namespace, &key()), "the segment has no header yet");
    assert!(pool.write_segment_header(1, BLOCK));
    assert!(!view.verify(slot, BLOCK), "free");

    assert!(pool.fill(slot, namespace, &key()));
    assert!(!view.verify(slot, BLOCK), "being filled");
    assert!(pool.commit(slot, 77));
    assert!(!pool.commit(slot, 77), "committed once");
    assert!(view.verify(slot, BLOCK));
    assert!(!view.verify(SlotRef { generation: slot.generation + 1, ..slot }, BLOCK), "another filling");
    assert!(!view.verify(slot, BLOCK + 512), "another block size");

    let header = view.read_header(slot.offset, BLOCK).expect("a slot");
    assert_eq!((header.state, header.generation), (pool::COMMITTED, slot.generation));
    assert_eq!((header.namespace, header.hash, header.group), (namespace, key().hash, 3));
    assert_eq!((header.length, header.set), (BLOCK, 0));
    assert_eq!((pool.checksum(slot), header.checksum != 77), (Some(77), true), "mixed with the header's own");

    let next = SlotRef { generation: slot.generation + 1, ..slot };
    assert!(!pool.free(next), "not that filling");
    assert!(pool.free(slot));
    assert!(!view.verify(slot, BLOCK), "evicted");
    assert!(pool.fill(next, namespace, &key()) && !pool.commit(slot, 0) && pool.commit(next, 0));
    assert!(!view.verify(slot, BLOCK) && view.verify(next, BLOCK));
    assert!(pool.write_segment_header(1, 2 * BLOCK));
    assert!(!view.verify(next, BLOCK), "the segment was given away");
    assert!(!pool.free(next), "and its old slots with it");
}

#[test]
fn a_memfd_pool_serves_engines_that_can_only_read() {
    let pool = Pool::create(&config(None)).expect("created");
    check_slot_life(&pool);
    let again = check_sealed(&pool);
    assert_eq!(rustix::io::write(&again, b"x").expect_err("sealed"), Errno::PERM);
}

/// Checks that an engine's descriptor cannot write or cut the pool. Returns that descriptor reopened
/// for writing.
fn check_sealed(pool: &Pool) -> OwnedFd {
    let engine = pool.read_only_fd().expect("opened");
    let writable = Region::map(engine.as_fd(), pool.len() as usize, Access::ReadWrite);
    assert_eq!(writable.expect_err("refused"), Errno::ACCESS);
    let again =
        rustix::fs::open(format!("/proc/self/fd/{}", engine.as_raw_fd()), OFlags::RDWR, Mode::empty());
    let again = again.expect("the mode of a memfd allows its owner to reopen it");
    let sealed = Region::map(again.as_fd(), pool.len() as usize, Access::ReadWrite);
    assert_eq!(sealed.expect_err("sealed"), Errno::PERM);
    assert_eq!(rustix::fs::ftruncate(&again, 0).expect_err("sealed"), Errno::PERM);
    again
}

#[test]
fn a_pool_file_is_private_locked_and_outlives_its_sidecar() {
    let path = TmpfsPath::new("file");
    let pool = created_in(&path);
    check_slot_life(&pool);
    assert!(matches!(Pool::create(&config(Some(path.0.clone()))), Err(TierError::Locked(_))));
    let stat = rustix::fs::stat(&path.0).expect("there");
    assert_eq!(stat.st_mode & 0o777, 0o600);
    assert!(stat.st_blocks as u64 * 512 >= pool.len(), "all of its memory is reserved");

    let engine = pool.read_only_fd().expect("opened");
    let region = Region::map(engine.as_fd(), pool.len() as usize, Access::ReadOnly).expect("mapped");
    let kept = SlotRef { generation: pool.first_generation() + 9, ..slot(0) };
    assert!(pool.write_segment_header(1, BLOCK) && pool.fill(kept, NamespaceDigest([1; 16]), &key()));
    assert!(pool.commit(kept, 0));
    assert_eq!((pool.checksum(kept), pool.verify(kept)), (None, false), "nobody has computed it");
    assert!(pool.sum(kept).is_some_and(|checksum| pool.set_checksum(kept, checksum)) && pool.verify(kept));
    let unsummed = SlotRef { offset: kept.offset - BLOCK.next_multiple_of(pool::SLOT_ALIGN), ..kept };
    assert!(pool.fill(unsummed, NamespaceDigest([1; 16]), &key()));
    assert_eq!(pool.unsummed(1), [], "it is being filled");
    assert!(pool.commit(unsummed, 0));
    assert_eq!((pool.unsummed(0), pool.unsummed(1), pool.unsummed(2)), (vec![], vec![unsummed], vec![]));
    let removed = SlotRef { offset: unsummed.offset - BLOCK.next_multiple_of(pool::SLOT_ALIGN), ..kept };
    assert!(pool.fill(removed, NamespaceDigest([1; 16]), &key()) && pool.commit(removed, 0));
    pool.disown_slot(removed);
    assert!(pool.set_checksum(removed, 1), "one that was being computed");
    let first_life = pool.first_generation();
    assert_eq!(pool.former_epoch(), None);
    drop(pool);

    let is_read = [kept, removed].map(|slot| view(&region).verify(slot, BLOCK));
    assert_eq!(is_read, [true; 2], "an engine still reads what it leased");
    let pool = created_in(&path);
    assert!(pool.first_generation() > first_life + (1 << 39), "no number of the first life comes again");
    assert!(view(&region).verify(kept, BLOCK), "also while the next sidecar has it");
    assert!(!pool.fill(kept, NamespaceDigest([1; 16]), &key()), "nothing is taken over unasked");
    assert_eq!((pool.found(), pool.take_over(0)), (&FoundPool::Pool, None));
    assert_eq!(pool.former_epoch(), Some(42), "what the first life was called");
    let geometry = pool.take_over(1).expect("a segment of the first life");
    let (namespace, hash) = (NamespaceDigest([1; 16]), key().hash);
    let whole = SlotRemains::Block { generation: kept.generation, namespace, group: 3, hash };
    let debris = SlotRemains::Debris { generation: unsummed.generation };
    let disowned = SlotRemains::Debris { generation: removed.generation };
    assert_eq!(pool.remains(1, &geometry, 4..8), [SlotRemains::Free, disowned, debris, whole]);
    assert!(pool.verify(kept));
    assert_eq!(pool.unsummed(1), [], "nobody knows what became of the block since its life");
    // A bit of the block, or of its fields in the header, and another filling's number.
    let header = geometry.place_of(kept.offset).expect("a slot").header;
    for (at, bit) in
        [(kept.offset, 0), (kept.offset + BLOCK - 1, 7), (header + slot::HASH, 63), (header + slot::GROUP, 1)]
    {
        let word = pool.region().word64((at / 8 * 8) as usize);
        let flip = 1 << ((at % 8 * 8 + bit) % 64);
        word.fetch_xor(flip, Ordering::Relaxed);
        assert!(!pool.verify(kept), "{at} {bit}");
        word.fetch_xor(flip, Ordering::Relaxed);
    }
    assert!(pool.verify(kept));
    assert!(pool.free(kept), "it can be evicted now");
    assert!(!view(&region).verify(kept, BLOCK));
}

/// The same file on a read-only mount needs a privilege: without it the test sees only the refusals.
#[test]
fn a_view_cannot_be_opened_for_writing() {
    let (path, other) = (TmpfsPath::new("viewed"), TmpfsPath::new("other-file"));
    let pool = created_in(&path);
    fs::write(&other.0, "").expect("written");
    for (view, why) in [(&other.0, "not the file of --pool-path"), (&path.0, "not on a read-only mount")] {
        let error = pool.open_view(view).expect_err("refused").to_string();
        assert!(error.contains(why), "{error}");
    }
    let point = std::env::temp_dir().join(format!("pillion-view-{}", std::process::id()));
    fs::write(&point, "").expect("written");
    let mount = |flags: &[&str]| {
        let status = std::process::Command::new("mount").args(flags).arg(&point).status();
        status.is_ok_and(|status| status.success())
    };
    let file = path.0.to_str().expect("a name");
    if mount(&["--bind", file]) {
        assert!(mount(&["-o", "remount,bind,ro"]));
        let view = pool.open_view(&point).expect("opened");
        // Lazily: the view is open.
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&point).status();
        assert!(unmounted.expect("run").success());
        let reopened =
            |flags| rustix::fs::open(format!("/proc/self/fd/{}", view.as_raw_fd()), flags, Mode::empty());
        assert_eq!(reopened(OFlags::RDWR).expect_err("refused"), Errno::ROFS);
        assert_eq!(reopened(OFlags::WRONLY | OFlags::TRUNC).expect_err("refused"), Errno::ROFS);
        assert_eq!(rustix::fs::fchmod(&view, Mode::all()).expect_err("refused"), Errno::ROFS);
        assert!(Region::map(view.as_fd(), pool.len() as usize, Access::ReadWrite).is_err());
        let region = Region::map(view.as_fd(), pool.len() as usize, Access::ReadOnly).expect("mapped");
        assert_eq!(region.load64(header::MAGIC as usize), pool::MAGIC);
    }
    fs::remove_file(point).expect("removed");
}

#[test]
fn bytes_are_read_at_every_place_within_a_word() {
    let path = TmpfsPath::new("words");
    let (pool, at) = (created_in(&path), slot(0).offset);
    let written: Vec<u8> = (1..=64).collect();
    let file = fs::OpenOptions::new().write(true).open(&path.0).expect("opened");
    rustix::io::pwrite(&file, &written, at).expect("written");
    for (from, to) in (0..20).flat_map(|from| (from..45).map(move |to| (from, to))) {
        let mut read = vec![0; to - from];
        pool.read_bytes(at + from as u64, &mut read);
        assert_eq!(read, written[from..to], "bytes {from}..{to}");
    }
}

#[test]
fn a_pool_file_that_is_cut_reads_as_zeros_and_is_known_to_be_lost() {
    let path = TmpfsPath::new("cut");
    let pool = created_in(&path);
    let kept = slot(pool.first_generation());
    assert!(pool.write_segment_header(1, BLOCK) && pool.fill(kept, NamespaceDigest([1; 16]), &key()));
    assert!(pool.commit(kept, 77) && pool.is_whole());
    fs::OpenOptions::new().write(true).open(&path.0).expect("opened").set_len(4096).expect("cut");
    assert_eq!(pool.checksum(kept), None, "touching it ends nothing");
    assert!(!pool.is_whole());
    assert!(!pool.commit(kept, 78) && !pool.free(kept));
    assert!(pool.write_segment_header(1, BLOCK), "writing neither");
    let mut bytes = [1; 100];
    pool.read_bytes(kept.offset, &mut bytes);
    assert_eq!(bytes, [0; 100]);
    drop(pool);
    let pool = created_in(&path);
    assert!(pool.is_whole(), "the next life is of the file as it is now");
    let memfd = Pool::create(&config(None)).expect("created");
    assert!(memfd.is_whole() && rustix::fs::ftruncate(memfd.fd(), 0).is_err());
}

#[test]
fn a_file_that_lost_memory_between_two_lives_is_not_taken_over() {
    type Damage = fn(&fs::File, u64);
    let at = slot(0).offset / 4096 * 4096;
    let damages: [Damage; 2] = [
        |file, at| {
            let bytes = file.metadata().expect("there").len();
            file.set_len(at).expect("cut");
            file.set_len(bytes).expect("made longer");
        },
        |file, at| {
            let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, punch, at, 4096).expect("punched");
        },
    ];
    for damage in damages {
        let path = TmpfsPath::new("holes");
        let pool = created_in(&path);
        let kept = slot(pool.first_generation());
        assert!(pool.write_segment_header(0, BLOCK) && pool.write_segment_header(1, BLOCK));
        assert!(pool.fill(kept, NamespaceDigest([1; 16]), &key()) && pool.commit(kept, 0));
        drop(pool);
        damage(&fs::OpenOptions::new().write(true).open(&path.0).expect("opened"), at);
        let pool = created_in(&path);
        let FoundPool::Unusable(reason) = pool.found() else { panic!("zeros behind a sound header") };
        assert_eq!(reason.cause, GivenUpCause::Unfinished);
        assert!(reason.to_string().contains("memory was taken from it"), "{reason}");
        while pool.reserving() {
            pool.reserve_some().expect("emptied and reserved");
        }
        drop(pool);
        let pool = created_in(&path);
        assert_eq!(pool.found(), &FoundPool::Pool);
        pool.disown().expect("disowned");
        drop(pool);
        let pool = created_in(&path);
        assert!(matches!(pool.found(), FoundPool::Unusable(_)));
    }
}

/// Makes the pool in a file, of this life or the next.
fn created_in(path: &TmpfsPath) -> Pool {
    created(&config(Some(path.0.clone())))
}

/// Makes a pool with the settings `config`.
pub(crate) fn created(config: &PoolConfig) -> Pool {
    unlocked(config).expect("created")
}

/// Makes a pool with the settings `config`, retrying while its file is locked. A child just forked by another
/// test holds the lock until it runs its own program.
fn unlocked(config: &PoolConfig) -> Result<Pool, TierError> {
    for _ in 0..1000 {
        match Pool::create(config) {
            Err(TierError::Locked(_)) => std::thread::sleep(std::time::Duration::from_millis(10)),
            made => return made,
        }
    }
    panic!("{config:?} stays locked")
}

/// A pool of a first life with one block, then the word at `field` of its file changed to `value`.
fn used_and_changed(path: &TmpfsPath, field: u64, value: u64) -> Pool {
    let pool = created_in(path);
    let kept = slot(pool.first_generation());
    assert!(pool.write_segment_header(1, BLOCK) && pool.fill(kept, NamespaceDigest([1; 16]), &key()));
    assert!(pool.commit(kept, 77));
    pool.region().word64(field as usize).store(value, Ordering::Relaxed);
    drop(pool);
    created_in(path)
}

#[test]
fn a_pool_of_another_kind_starts_empty_and_says_why() {
    for (field, value, cause, why) in [
        (header::MAGIC, 99, GivenUpCause::Damaged, "not a pool file"),
        (
            header::VERSION,
            1,
            GivenUpCause::Version,
            "version 1 (release not stated), and this release reads version 2 (release 0.",
        ),
        (header::OLDEST, 99, GivenUpCause::Version, "versions 99 to 2 (release 0."),
        (header::BOOT_ID, 99, GivenUpCause::Boot, "last reboot"),
        (header::BOOT_ID + 8, 99, GivenUpCause::Boot, "last reboot"),
        (header::SEGMENT_BYTES, 99, GivenUpCause::Sizes, "segments have 99 bytes"),
        (header::SEGMENTS, 99, GivenUpCause::Damaged, "segment count is 99"),
        (header::SETTLED, 99, GivenUpCause::Unfinished, "while it emptied the file"),
    ] {
        let path = TmpfsPath::new("other");
        let pool = used_and_changed(&path, field, value);
        let FoundPool::Unusable(reason) = pool.found() else { panic!("{field}: {:?}", pool.found()) };
        assert_eq!(reason.cause, cause, "{reason}");
        assert!(reason.to_string().contains(why), "{reason}");
        let engine = pool.read_only_fd().expect("opened");
        let region = Region::map(engine.as_fd(), pool.len() as usize, Access::ReadOnly).expect("mapped");
        let kept = slot(pool::first_generation(1));
        assert!(view(&region).verify(kept, BLOCK), "an engine may be copying from it");
        assert_eq!((pool.take_over(1), pool.reserved_segments(), pool.reserving()), (None, 0, true));
        drop(pool);
        let pool = created_in(&path);
        assert!(matches!(pool.found(), FoundPool::Unusable(_)), "still not emptied");
        pool.reserve_some().expect("the first segment");
        assert!(!view(&region).verify(kept, BLOCK), "nothing is left of it");
        pool.reserve_some().expect("the second segment");
        assert_eq!((pool.reserved_bytes(), pool.reserving()), (pool.len(), false));
        drop(pool);
        let pool = created_in(&path);
        assert_eq!((pool.found(), pool.take_over(1)), (&FoundPool::Pool, None));
    }
    for life in [0, pool::LIFE_MAX, u64::MAX] {
        let path = TmpfsPath::new("lives");
        let pool = used_and_changed(&path, header::LIFE, life);
        assert!(matches!(pool.found(), FoundPool::Unusable(_)), "{life}");
        assert!((1..=pool::LIFE_MAX).contains(&pool.life));
    }
}

#[test]
fn a_pool_of_a_later_release_that_this_one_reads_is_adopted() {
    let path = TmpfsPath::new("later");
    let pool = used_and_changed(&path, header::VERSION, u64::from(pool::VERSION) + 7);
    assert_eq!(pool.found(), &FoundPool::Pool);
    let geometry = pool.take_over(1).expect("a segment of the later release");
    assert!(matches!(pool.remains(1, &geometry, 7..8)[..], [SlotRemains::Block { .. }]));
    let word = |at: u64| pool.region().word64(at as usize);
    let stated = [header::VERSION, header::OLDEST].map(|at| word(at).load(Ordering::Relaxed));
    assert_eq!(stated, [pool::VERSION, pool::OLDEST].map(u64::from), "written by this release from now on");
    // The later release's values in a slot's reserved words are zeros after a filling of this release.
    let next = SlotRef { generation: pool.first_generation(), ..slot(0) };
    let header = geometry.place_of(next.offset).expect("a slot").header;
    let padding = (slot::PADDING..pool::SLOT_HEADER_BYTES).step_by(8).map(|at| word(header + at));
    padding.clone().for_each(|word| word.store(!0, Ordering::Relaxed));
    assert!(pool.fill(next, NamespaceDigest([1; 16]), &key()));
    assert!(padding.clone().all(|word| word.load(Ordering::Relaxed) == 0) && padding.count() == 5);
}

#[test]
fn a_pool_file_grows_with_its_blocks() {
    let path = TmpfsPath::new("grows");
    drop(used_and_changed(&path, header::EPOCH, 1));
    let larger = PoolConfig { bytes: 4 * SEGMENT, ..config(Some(path.0.clone())) };
    let pool = created(&larger);
    assert_eq!((pool.found(), pool.reserved_segments()), (&FoundPool::Pool, 4));
    assert!(pool.take_over(1).is_some() && pool.take_over(3).is_none());
    assert!(pool.write_segment_header(3, BLOCK));
}

#[test]
fn a_file_that_is_no_pool_is_initialised_and_a_larger_one_refused() {
    let path = TmpfsPath::new("garbage");
    fs::write(&path.0, vec![0xff; 1 << 20]).expect("written");
    let pool = created_in(&path);
    assert!(matches!(pool.found(), FoundPool::Unusable(_)));
    let mut file = fs::File::open(&path.0).expect("open");
    drop(pool);
    file.seek(SeekFrom::Start(0)).expect("seek");
    let mut magic = [0; 8];
    file.read_exact(&mut magic).expect("read");
    assert_eq!(&magic, b"PILLPOOL");

    let smaller = PoolConfig { bytes: SEGMENT, ..config(Some(path.0.clone())) };
    let refused = unlocked(&smaller).expect_err("never shrunk").to_string();
    assert!(refused.contains("raise --dram"), "{refused}");
}

#[test]
fn places_that_cannot_hold_a_pool_are_refused_before_anything_is_made() {
    let large = PoolConfig { bytes: 1 << 40, ..config(None) };
    assert!(matches!(Pool::create(&large), Err(TierError::NoMemory { .. })));
    let path = TmpfsPath::new("large");
    let large = PoolConfig { path: Some(path.0.clone()), ..large };
    assert!(matches!(Pool::create(&large), Err(TierError::NoMemory { .. })));
    assert!(!path.0.exists());
    let procfs = PoolConfig { path: Some("/proc/pillion-pool".into()), ..config(None) };
    let refused = Pool::create(&procfs).expect_err("not tmpfs").to_string();
    assert!(refused.contains("not on tmpfs or hugetlbfs"), "{refused}");
    let small = PoolConfig { bytes: SEGMENT - 1, ..config(None) };
    assert!(matches!(Pool::create(&small), Err(TierError::TooSmall { min: SEGMENT, .. })));
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let (target, link) = (TmpfsPath::new("target"), TmpfsPath::new("link"));
    fs::File::create(&target.0).and_then(|mut file| file.write_all(b"x")).expect("written");
    std::os::unix::fs::symlink(&target.0, &link.0).expect("linked");
    assert!(matches!(Pool::create(&config(Some(link.0.clone()))), Err(TierError::File { .. })));
    assert_eq!(fs::read(&target.0).expect("read"), b"x");
}
