//! Plans of copies for a set of blocks: as few copies as the addresses allow. Pure arithmetic.
//!
//! Neighbours on both sides are joined, then equal pieces at equal distances become one pitched copy, and the
//! rest goes into one batch. 640 blocks of one prompt are then few copies if both sides are consecutive. No
//! copy reaches across the end of a slice of the pool: each slice is locked by a call of its own, and the
//! driver refuses a copy over two.

use std::ops::Range;

use shm_protocol::handshake::BlockRegion;

/// Minimum pieces at equal distances for a pitched copy: fewer go into the batch.
const PITCHED_ROWS_MIN: usize = 8;
/// Maximum distance between rows for the driver (CU_DEVICE_ATTRIBUTE_MAX_PITCH is 2^31 - 1).
const PITCH_MAX: u64 = (1 << 31) - 1;

/// One run of bytes on both sides.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    /// Address on the GPU.
    pub(super) device: u64,
    /// Offset in the pool.
    pub(super) host: u64,
    pub(super) bytes: u64,
}

/// Equal pieces at equal distances.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct Pitched {
    pub(super) first: Piece,
    pub(super) device_pitch: u64,
    pub(super) host_pitch: u64,
    pub(super) rows: usize,
}

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Plan {
    pub(super) pitched: Vec<Pitched>,
    pub(super) scattered: Vec<Piece>,
}

/// The copies of part `cut` (a byte range of each block) of `blocks`: (block, pool offset of its first byte).
pub(super) fn plan(
    bases: &[u64],
    regions: &[BlockRegion],
    slice_bytes: u64,
    cut: &Range<u64>,
    blocks: &[(u32, u64)],
) -> Plan {
    let mut pieces = Vec::new();
    let mut at = 0;
    for region in regions {
        let inside = at.max(cut.start)..(at + region.bytes).min(cut.end);
        if inside.start < inside.end {
            let base = bases[region.fd as usize] + region.offset + (inside.start - at);
            let bytes = inside.end - inside.start;
            let piece = |&(block, slot): &(u32, u64)| Piece {
                device: base + u64::from(block) * region.stride,
                host: slot + inside.start,
                bytes,
            };
            blocks.iter().map(piece).for_each(|piece| push(&mut pieces, slice_bytes, piece));
        }
        at += region.bytes;
    }
    arrange(&pieces, slice_bytes)
}

/// Adds a piece, cut at the ends of slices and joined to the last one if both sides continue it.
fn push(pieces: &mut Vec<Piece>, slice_bytes: u64, mut piece: Piece) {
    while piece.bytes > 0 {
        let here = piece.bytes.min(slice_bytes - piece.host % slice_bytes);
        let goes_on = |last: &&mut Piece| {
            last.device + last.bytes == piece.device
                && last.host + last.bytes == piece.host
                && !piece.host.is_multiple_of(slice_bytes)
        };
        match pieces.last_mut().filter(goes_on) {
            Some(last) => last.bytes += here,
            None => pieces.push(Piece { bytes: here, ..piece }),
        }
        piece = Piece { device: piece.device + here, host: piece.host + here, bytes: piece.bytes - here };
    }
}

fn arrange(pieces: &[Piece], slice_bytes: u64) -> Plan {
    let mut plan = Plan::default();
    let mut rest = pieces;
    while let Some(first) = rest.first() {
        let rows = equal_distances(rest, slice_bytes);
        if rows >= PITCHED_ROWS_MIN {
            let device_pitch = rest[1].device - first.device;
            let host_pitch = rest[1].host - first.host;
            plan.pitched.push(Pitched { first: *first, device_pitch, host_pitch, rows });
            rest = &rest[rows..];
        } else {
            plan.scattered.push(*first);
            rest = &rest[1..];
        }
    }
    plan
}

/// The number of pieces, from the first on, of equal length and at equal distances, on each side, and in one
/// slice.
fn equal_distances(pieces: &[Piece], slice_bytes: u64) -> usize {
    let [one, two, ..] = pieces else { return pieces.len() };
    let pitch = |from: u64, to: u64| to.checked_sub(from).filter(|p| (one.bytes..=PITCH_MAX).contains(p));
    let (Some(device), Some(host)) = (pitch(one.device, two.device), pitch(one.host, two.host)) else {
        return 1;
    };
    let equal = |pair: &[Piece]| {
        pair[1].bytes == one.bytes
            && pair[0].device + device == pair[1].device
            && pair[0].host + host == pair[1].host
            && pair[0].host / slice_bytes == pair[1].host / slice_bytes
    };
    1 + pieces.windows(2).take_while(|pair| equal(pair)).count()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Every byte of the cut, from its source to its target, according to the regions.
    fn bytes_wanted(regions: &[BlockRegion], cut: &Range<u64>, blocks: &[(u32, u64)]) -> BTreeMap<u64, u64> {
        let mut wanted = BTreeMap::new();
        for &(block, slot) in blocks {
            let runs = regions.iter().flat_map(|r| (0..r.bytes).map(move |i| (r, i)));
            for (at, (region, i)) in (0..).zip(runs).filter(|(at, _)| cut.contains(at)) {
                let base = 1_000_000 * u64::from(region.fd);
                wanted.insert(base + region.offset + u64::from(block) * region.stride + i, slot + at);
            }
        }
        wanted
    }

    fn bytes_planned(plan: &Plan) -> BTreeMap<u64, u64> {
        let rows = plan.pitched.iter().flat_map(|p| {
            (0..p.rows as u64).map(move |row| Piece {
                device: p.first.device + row * p.device_pitch,
                host: p.first.host + row * p.host_pitch,
                ..p.first
            })
        });
        let pieces = rows.chain(plan.scattered.iter().copied());
        let mut bytes = BTreeMap::new();
        for piece in pieces {
            for i in 0..piece.bytes {
                assert!(bytes.insert(piece.device + i, piece.host + i).is_none(), "a byte copied twice");
            }
        }
        bytes
    }

    const SLICE: u64 = 1 << 20;
    const BLOCK_OUTERMOST: [BlockRegion; 1] = [BlockRegion { fd: 0, offset: 0, stride: 64, bytes: 64 }];

    #[test]
    fn consecutive_blocks_are_one_copy_and_a_layer_group_of_them_is_one_pitched_copy() {
        let blocks: Vec<(u32, u64)> = (0..640).map(|i| (100 + i, 4096 + u64::from(i) * 64)).collect();
        let whole = plan(&[0], &BLOCK_OUTERMOST, SLICE, &(0..64), &blocks);
        let all = Piece { device: 6400, host: 4096, bytes: 640 * 64 };
        assert_eq!(whole, Plan { pitched: vec![], scattered: vec![all] });
        let group = plan(&[0], &BLOCK_OUTERMOST, SLICE, &(16..32), &blocks);
        let first = Piece { device: 6416, host: 4112, bytes: 16 };
        assert_eq!(group.pitched, [Pitched { first, device_pitch: 64, host_pitch: 64, rows: 640 }]);
        assert!(group.scattered.is_empty());
    }

    #[test]
    fn layer_outermost_memory_is_one_pitched_copy_a_layer() {
        let layer = |i: u64| BlockRegion { fd: 0, offset: i * 100_000, stride: 16, bytes: 16 };
        let regions: Vec<_> = (0..4).map(layer).collect();
        let blocks: Vec<(u32, u64)> = (0..40).map(|i| (i, u64::from(i) * 64)).collect();
        let plan = plan(&[0], &regions, SLICE, &(0..64), &blocks);
        assert_eq!((plan.pitched.len(), plan.scattered.len()), (4, 0));
        assert!(plan.pitched.iter().all(|p| (p.device_pitch, p.host_pitch, p.rows) == (16, 64, 40)));
    }

    #[test]
    fn scattered_and_falling_blocks_are_pieces_of_a_batch() {
        let blocks: Vec<(u32, u64)> = (0..40).map(|i| (40 - i, u64::from(i) * 64)).collect();
        let plan = plan(&[0], &BLOCK_OUTERMOST, SLICE, &(0..64), &blocks);
        assert_eq!((plan.pitched.len(), plan.scattered.len()), (0, 40));
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_once_and_to_its_place(
            ids in proptest::collection::btree_set(0_u32..60, 1..40),
            order in any::<bool>(),
            slots in proptest::collection::vec(0_u64..64, 40),
            from in 0_u64..24, length in 1_u64..24, slice in 1_u64..400,
        ) {
            let regions = [
                BlockRegion { fd: 0, offset: 3, stride: 8, bytes: 8 },
                BlockRegion { fd: 1, offset: 0, stride: 20, bytes: 11 },
                BlockRegion { fd: 0, offset: 600, stride: 5, bytes: 5 },
            ];
            let mut ids: Vec<u32> = ids.into_iter().collect();
            if order {
                ids.reverse();
            }
            let blocks: Vec<(u32, u64)> = ids.into_iter().zip(slots.iter().map(|s| s * 24)).collect();
            let cut = from..(from + length).min(24);
            let made = plan(&[0, 1_000_000], &regions, slice, &cut, &blocks);
            let last = |p: &Piece| (p.host + p.bytes - 1) / slice;
            prop_assert!(made.scattered.iter().all(|p| p.host / slice == last(p)));
            let end = |p: &Pitched| last(&Piece { host: p.first.host + (p.rows as u64 - 1) * p.host_pitch, ..p.first });
            prop_assert!(made.pitched.iter().all(|p| p.first.host / slice == end(p)));
            prop_assert_eq!(bytes_planned(&made), bytes_wanted(&regions, &cut, &blocks));
        }
    }
}
