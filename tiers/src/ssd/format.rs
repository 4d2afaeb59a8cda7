//! The layout of a device, little-endian, in units that direct I/O and the file system handle whole.
//!
//! ```text
//! device:   superblock (unit 0), the check's unit (unit 1), what is distrusted (unit 2), nothing up to 1 MiB, segments
//! segment:  header (1 unit), blocks, ..., footer (entries, then the trailer in the last unit)
//! block:    header (1 unit), bytes in whole units
//! ```
//!
//! Every structure except the superblock has a checksum seeded with the log's random number, its own place
//! and its segment's sequence. No two uses of a segment share a sequence: remains of other logs and of
//! earlier uses match no lookup.

use shm_protocol::key::{BlockHash, NamespaceDigest};
pub(crate) use shm_protocol::pool::checksum;
use shm_protocol::versions::{RELEASE_BYTES, Versions};
use twox_hash::XxHash3_64;

use super::{Label, Place};

/// Version of this layout.
const VERSION: u32 = 3;
/// The oldest version read correctly by this release, and the oldest whose release reads this one's files.
const OLDEST: u32 = 3;
/// Bytes before the first segment, so segments begin at the borders of erase blocks and stripes.
pub(crate) const SUPER_BYTES: u64 = 1 << 20;
/// Units before the blocks of a segment.
pub(crate) const HEADER_UNITS: u32 = 1;
/// The smallest unit: each structure below fits one.
pub(crate) const UNIT_BYTES_MIN: u64 = 512;
/// The largest unit: three fit before the first segment.
pub(crate) const UNIT_BYTES_MAX: u64 = 64 << 10;
/// The largest segment: one transfer moves a block in it.
pub(crate) const SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// Bits of a sequence below the number of its life.
const LIFE_SHIFT: u32 = 32;
/// Bytes of a footer's entry.
pub(crate) const ENTRY_BYTES: usize = 64;

const SUPER_MAGIC: u64 = u64::from_le_bytes(*b"PILLSSD\0");
const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"PILLSSEG");
const BLOCK_MAGIC: u64 = u64::from_le_bytes(*b"PILLSBLK");
const TRAILER_MAGIC: u64 = u64::from_le_bytes(*b"PILLSEND");
const DISTRUSTED_MAGIC: u64 = u64::from_le_bytes(*b"PILLSDIS");
/// Ends of the bytes covered by the checksum of each structure, from [`COVERED`] on. A superblock's checksum
/// covers all of the smallest unit: a later release may add fields, and this release still finds the
/// superblock whole.
const SUPER_END: usize = UNIT_BYTES_MIN as usize;
const SUPER_RELEASE: usize = 56;
const SEGMENT_END: usize = 28;
const BLOCK_END: usize = 96;
const TRAILER_END: usize = 40;
const DISTRUSTED_END: usize = DISTRUSTED_FIRST + DISTRUSTED_MAX * DISTRUSTED_BYTES;
const DISTRUSTED_FIRST: usize = 32;
const DISTRUSTED_BYTES: usize = 24;
/// Most namespaces distrusted one by one; beyond, the oldest ones are distrusted together with all blocks as
/// old.
const DISTRUSTED_MAX: usize = 16;
const COVERED: usize = 16;

/// The first unit of a device.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Super {
    /// The log's random number.
    pub(crate) id: u64,
    pub(crate) unit_bytes: u64,
    pub(crate) segment_bytes: u64,
    /// Number of times the log was opened.
    pub(crate) life: u64,
}

/// The content of a device's first unit.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Found {
    Log(Super),
    Empty,
    /// A log of a layout this release does not read.
    Version(Versions),
    /// A log whose superblock is damaged.
    Damaged,
    /// Other data, which this process must not overwrite.
    Foreign,
}

/// Blocks hidden from later lives: engines disagreed about the KV of their namespace.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Distrusted {
    /// Sequences below this one are distrusted for every namespace.
    floor: u64,
    /// Namespaces, each with a sequence below which its blocks are distrusted, the first distrusted first.
    namespaces: Vec<(NamespaceDigest, u64)>,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Header {
    pub(crate) place: Place,
    pub(crate) sequence: u64,
    pub(crate) label: Label,
    /// XXH3-64 of the block's bytes.
    pub(crate) checksum: u64,
}

/// The end of a sealed segment.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Trailer {
    pub(crate) segment: u32,
    pub(crate) sequence: u64,
    pub(crate) count: u32,
    /// XXH3-64 of the entries.
    checksum: u64,
}

// === fields ===

fn get<const N: usize>(unit: &[u8], at: usize) -> [u8; N] {
    unit[at..at + N].try_into().expect("N bytes")
}

fn get32(unit: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(unit, at))
}

fn get64(unit: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(unit, at))
}

fn put(unit: &mut [u8], at: usize, bytes: &[u8]) {
    unit[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Ends a structure after its fields were put: magic, then the checksum of all bytes from [`COVERED`] to
/// `end`.
fn seal(unit: &mut [u8], magic: u64, seed: u64, end: usize) {
    put(unit, 0, &magic.to_le_bytes());
    let checksum = XxHash3_64::oneshot_with_seed(seed, &unit[COVERED..end]);
    put(unit, 8, &checksum.to_le_bytes());
}

fn sealed(unit: &[u8], magic: u64, seed: u64, end: usize) -> bool {
    get64(unit, 0) == magic && get64(unit, 8) == XxHash3_64::oneshot_with_seed(seed, &unit[COVERED..end])
}

/// Returns the layouts read by this release, for the superblock too.
pub(crate) fn own_versions() -> Versions {
    Versions::own(VERSION, OLDEST)
}

// === sizes ===

/// Returns the units of a block with its header.
pub(crate) fn block_units(bytes: u32, unit_bytes: u64) -> u32 {
    1 + u64::from(bytes).div_ceil(unit_bytes) as u32
}

/// Returns the units of a footer with `count` blocks.
pub(crate) fn footer_units(count: u32, unit_bytes: u64) -> u32 {
    (u64::from(count) * ENTRY_BYTES as u64).div_ceil(unit_bytes) as u32 + 1
}

// === sequences ===

/// Returns the first sequence of a life: its number is the upper half of each.
pub(crate) fn first_sequence(life: u64) -> u64 {
    life << LIFE_SHIFT
}

/// Returns a sequence above all those of `sequence`'s life, and below those of the next life.
pub(crate) fn life_end(sequence: u64) -> u64 {
    sequence | ((1 << LIFE_SHIFT) - 1)
}

// === impl Super ===

impl Super {
    /// Writes the superblock as a release of these versions does.
    pub(crate) fn write(&self, own: &Versions, unit: &mut [u8]) {
        unit.fill(0);
        put(unit, 16, &own.version.to_le_bytes());
        put(unit, 20, &own.oldest.to_le_bytes());
        put(unit, SUPER_RELEASE, &own.release_bytes());
        for (at, word) in [(24, self.id), (32, self.unit_bytes), (40, self.segment_bytes), (48, self.life)] {
            put(unit, at, &word.to_le_bytes());
        }
        seal(unit, SUPER_MAGIC, 0, SUPER_END);
    }

    /// True if a superblock that was cut short began so.
    pub(crate) fn begins(bytes: &[u8]) -> bool {
        SUPER_MAGIC.to_le_bytes().starts_with(bytes)
    }

    /// Reads a superblock. Magic, versions and release keep their places in every version.
    pub(crate) fn read(unit: &[u8]) -> Found {
        if unit.iter().all(|byte| *byte == 0) {
            return Found::Empty;
        }
        if get64(unit, 0) != SUPER_MAGIC {
            return Found::Foreign;
        }
        let (version, oldest) = (get32(unit, 16).into(), get32(unit, 20).into());
        let found = Versions::of_file(version, oldest, &get::<RELEASE_BYTES>(unit, SUPER_RELEASE));
        if own_versions().common(&found).is_none() {
            return Found::Version(found);
        }
        if !sealed(unit, SUPER_MAGIC, 0, SUPER_END) {
            return Found::Damaged;
        }
        let [id, unit_bytes, segment_bytes, life] = [24, 32, 40, 48].map(|at| get64(unit, at));
        Found::Log(Self { id, unit_bytes, segment_bytes, life })
    }
}

// === impl Distrusted ===

impl Distrusted {
    /// Returns its place on a device, in bytes.
    pub(crate) fn offset(unit_bytes: u64) -> u64 {
        2 * unit_bytes
    }

    /// Distrusts a namespace's blocks in segments of sequences below `before`.
    pub(crate) fn add(&mut self, namespace: NamespaceDigest, before: u64) {
        self.namespaces.retain(|(other, _)| *other != namespace);
        self.namespaces.push((namespace, before));
        if self.namespaces.len() > DISTRUSTED_MAX {
            self.floor = self.floor.max(self.namespaces.remove(0).1);
        }
    }

    /// True if a namespace's blocks in a segment of this sequence are distrusted.
    pub(crate) fn has(&self, namespace: NamespaceDigest, sequence: u64) -> bool {
        let listed = |(other, before): &(NamespaceDigest, u64)| *other == namespace && sequence < *before;
        sequence < self.floor || self.namespaces.iter().any(listed)
    }

    pub(crate) fn write(&self, unit: &mut [u8], id: u64) {
        unit.fill(0);
        put(unit, 16, &self.floor.to_le_bytes());
        put(unit, 24, &(self.namespaces.len() as u32).to_le_bytes());
        for (at, (namespace, before)) in self.namespaces.iter().enumerate() {
            let at = DISTRUSTED_FIRST + at * DISTRUSTED_BYTES;
            put(unit, at, &namespace.0);
            put(unit, at + 16, &before.to_le_bytes());
        }
        seal(unit, DISTRUSTED_MAGIC, id, DISTRUSTED_END);
    }

    pub(crate) fn read(unit: &[u8], id: u64) -> Option<Self> {
        if !sealed(unit, DISTRUSTED_MAGIC, id, DISTRUSTED_END) {
            return None;
        }
        let count = (get32(unit, 24) as usize).min(DISTRUSTED_MAX);
        let at = |number| DISTRUSTED_FIRST + number * DISTRUSTED_BYTES;
        let namespace = |number| (NamespaceDigest(get(unit, at(number))), get64(unit, at(number) + 16));
        Some(Self { floor: get64(unit, 16), namespaces: (0..count).map(namespace).collect() })
    }
}

// === segment headers ===

pub(crate) fn write_segment(unit: &mut [u8], id: u64, segment: u32, sequence: u64) {
    unit.fill(0);
    put(unit, 16, &sequence.to_le_bytes());
    put(unit, 24, &segment.to_le_bytes());
    seal(unit, SEGMENT_MAGIC, id, SEGMENT_END);
}

/// Returns the sequence of `segment`, if this is its header.
pub(crate) fn read_segment(unit: &[u8], id: u64, segment: u32) -> Option<u64> {
    let valid = sealed(unit, SEGMENT_MAGIC, id, SEGMENT_END) && get32(unit, 24) == segment;
    valid.then(|| get64(unit, 16))
}

// === impl Header ===

impl Header {
    pub(crate) fn write(&self, unit: &mut [u8], id: u64) {
        unit.fill(0);
        put(unit, 16, &self.sequence.to_le_bytes());
        put(unit, 24, &self.place.segment.to_le_bytes());
        put(unit, 28, &self.place.unit.to_le_bytes());
        put(unit, 32, &self.label.namespace.0);
        put(unit, 48, &self.label.hash.0);
        put(unit, 80, &self.label.group.to_le_bytes());
        put(unit, 84, &self.label.bytes.to_le_bytes());
        put(unit, 88, &self.checksum.to_le_bytes());
        seal(unit, BLOCK_MAGIC, id, BLOCK_END);
    }

    pub(crate) fn read(unit: &[u8], id: u64) -> Option<Self> {
        if !sealed(unit, BLOCK_MAGIC, id, BLOCK_END) {
            return None;
        }
        Some(Self {
            place: Place { segment: get32(unit, 24), unit: get32(unit, 28) },
            sequence: get64(unit, 16),
            label: Label {
                namespace: NamespaceDigest(get(unit, 32)),
                group: get32(unit, 80),
                hash: BlockHash(get(unit, 48)),
                bytes: get32(unit, 84),
            },
            checksum: get64(unit, 88),
        })
    }
}

// === footers ===

/// Appends a block to a footer's entries; it begins at `unit`.
pub(crate) fn push_entry(entries: &mut Vec<u8>, unit: u32, label: &Label) {
    entries.extend_from_slice(&unit.to_le_bytes());
    entries.extend_from_slice(&label.bytes.to_le_bytes());
    entries.extend_from_slice(&label.group.to_le_bytes());
    entries.extend_from_slice(&[0; 4]);
    entries.extend_from_slice(&label.namespace.0);
    entries.extend_from_slice(&label.hash.0);
}

/// Returns the entries of a footer.
pub(crate) fn read_entries(entries: &[u8]) -> impl Iterator<Item = (u32, Label)> + '_ {
    entries.chunks_exact(ENTRY_BYTES).map(|entry| {
        let label = Label {
            namespace: NamespaceDigest(get(entry, 16)),
            group: get32(entry, 8),
            hash: BlockHash(get(entry, 32)),
            bytes: get32(entry, 4),
        };
        (get32(entry, 0), label)
    })
}

impl Trailer {
    pub(crate) fn new(segment: u32, sequence: u64, entries: &[u8]) -> Self {
        Self { segment, sequence, count: (entries.len() / ENTRY_BYTES) as u32, checksum: checksum(entries) }
    }

    pub(crate) fn write(&self, unit: &mut [u8], id: u64) {
        unit.fill(0);
        put(unit, 16, &self.sequence.to_le_bytes());
        put(unit, 24, &self.segment.to_le_bytes());
        put(unit, 28, &self.count.to_le_bytes());
        put(unit, 32, &self.checksum.to_le_bytes());
        seal(unit, TRAILER_MAGIC, id, TRAILER_END);
    }

    pub(crate) fn read(unit: &[u8], id: u64) -> Option<Self> {
        sealed(unit, TRAILER_MAGIC, id, TRAILER_END).then(|| Self {
            segment: get32(unit, 24),
            sequence: get64(unit, 16),
            count: get32(unit, 28),
            checksum: get64(unit, 32),
        })
    }

    /// True if `entries` match the trailer.
    pub(crate) fn lists(&self, entries: &[u8]) -> bool {
        entries.len() == self.count as usize * ENTRY_BYTES && checksum(entries) == self.checksum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_distrusted_is_read_as_it_was_written_and_the_oldest_of_many_takes_all_with_it() {
        let namespace = |number: u64| NamespaceDigest([number as u8; 16]);
        let mut distrusted = Distrusted::default();
        distrusted.add(namespace(0), 5);
        distrusted.add(namespace(0), 10);
        assert!(distrusted.has(namespace(0), 9) && !distrusted.has(namespace(0), 10));
        assert!(!distrusted.has(namespace(1), 0));
        (1..=DISTRUSTED_MAX as u64).for_each(|number| distrusted.add(namespace(number), 10 + number));
        assert!(distrusted.has(namespace(99), 9) && !distrusted.has(namespace(99), 10));
        assert!(distrusted.has(namespace(1), 10) && !distrusted.has(namespace(1), 11));
        let mut unit = [7; UNIT_BYTES_MIN as usize];
        distrusted.write(&mut unit, 42);
        assert_eq!(Distrusted::read(&unit, 42), Some(distrusted));
        assert_eq!(Distrusted::read(&unit, 43), None, "another log's");
        unit[100] ^= 1;
        assert_eq!(Distrusted::read(&unit, 42), None);
    }
}
