//! A pool of huge pages, if this user may reserve some.

use std::process::Command;

use super::*;

const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const WANTED: u64 = 64;
const PAGE: u64 = 2 << 20;

/// Additional huge pages, until the test ends.
struct Reserved(u64);

/// A hugetlbfs for the test alone.
struct Mount(PathBuf);

fn reserved() -> Option<u64> {
    fs::read_to_string(RESERVED).ok()?.trim().parse().ok()
}

impl Reserved {
    /// Returns `None`, with a note, if the machine does not allow it.
    fn new() -> Option<Self> {
        let skip = |why: String| {
            eprintln!("SKIPPED: huge pages are not tested here: {why}");
            None
        };
        let Some(before) = reserved() else { return skip(format!("{RESERVED} cannot be read")) };
        if let Err(error) = fs::write(RESERVED, (before + WANTED).to_string()) {
            return skip(format!("{RESERVED} cannot be written: {error}"));
        }
        let guard = Self(before);
        match reserved() {
            Some(now) if now >= before + WANTED => Some(guard),
            now => skip(format!("of {WANTED} more, {before} became {now:?}: memory is fragmented")),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = fs::write(RESERVED, self.0.to_string());
    }
}

impl Mount {
    fn new(options: &str) -> Option<Self> {
        let folder =
            std::env::temp_dir().join(format!("pillion-huge-{}-{}", std::process::id(), options.len()));
        fs::create_dir_all(&folder).expect("a folder");
        let options = format!("pagesize=2M{options}");
        let mounted =
            Command::new("mount").args(["-t", "hugetlbfs", "-o", &options, "none"]).arg(&folder).status();
        let mount = Self(folder);
        if mounted.is_ok_and(|status| status.success()) {
            return Some(mount);
        }
        eprintln!("SKIPPED: a pool file on hugetlbfs is not tested here: it cannot be mounted");
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).stderr(std::process::Stdio::null()).status();
        let _ = fs::remove_dir(&self.0);
    }
}

/// Bytes of huge pages behind this process's mappings.
fn hugetlb_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/smaps_rollup").expect("this process's");
    let figures = status
        .lines()
        .filter_map(|line| line.strip_prefix("Shared_Hugetlb:").or(line.strip_prefix("Private_Hugetlb:")));
    figures
        .map(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") * 1024)
        .sum()
}

fn check_pool(path: Option<PathBuf>) -> Pool {
    let huge = Config { bytes: 16 * SEGMENT, hugepages: true, ..config(path) };
    let pool = unlocked(&huge).expect("enough pages are reserved");
    assert_eq!((pool.len(), pool.reserved_bytes()), (16 * SEGMENT + PAGE, pool.len()));
    check_slot_life(&pool);
    assert_eq!(hugetlb_bytes(), 2 * PAGE, "header and one segment's, as far as they were touched");
    pool
}

/// One test, since the machine has one set of huge pages.
#[test]
fn a_pool_of_huge_pages() {
    let few = Config { bytes: 1 << 40, hugepages: true, ..config(None) };
    let refused = Pool::create(&few).expect_err("no machine has so many").to_string();
    assert!(
        refused.contains("524289 huge pages") && refused.contains("sysctl vm.nr_hugepages="),
        "{refused}"
    );
    let path = TmpfsPath::new("huge");
    let small_pages = Config { hugepages: true, ..config(Some(path.0.clone())) };
    let refused = Pool::create(&small_pages).expect_err("on tmpfs").to_string();
    assert!(refused.contains("hugetlbfs mount, or no --pool-path") && !path.0.exists(), "{refused}");

    let Some(_reserved) = Reserved::new() else { return };
    let pool = check_pool(None);
    check_sealed(&pool);
    drop(pool);

    let Some(mount) = Mount::new("") else { return };
    let file = mount.0.join("pool");
    drop(check_pool(Some(file.clone())));
    let pool = check_pool(Some(file.clone()));
    assert_eq!(pool.found(), &Found::Pool, "the file outlived its pool");
    let many = Config { bytes: 64 * SEGMENT, ..config(Some(mount.0.join("many"))) };
    assert!(matches!(Pool::create(&many), Err(Error::NoHugePages { .. })));
    drop(pool);
    fs::remove_file(file).expect("removed");

    let Some(sized) = Mount::new(",size=32M") else { return };
    let large = Config { bytes: 16 * SEGMENT, ..config(Some(sized.0.join("pool"))) };
    assert!(matches!(Pool::create(&large), Err(Error::NoMemory { available, .. }) if available == 32 << 20));
}
