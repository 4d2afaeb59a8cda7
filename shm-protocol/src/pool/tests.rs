use super::*;

const SEGMENT: u64 = 4 << 20;

#[test]
fn slots_fill_a_segment_and_never_leave_it() {
    for segment_bytes in [SEGMENT_ALIGN, SEGMENT, 64 << 20, SEGMENT_BYTES_MAX] {
        for block_bytes in [1, 511, 512, 513, 4096, 10_000, 1 << 20, block_bytes_max(segment_bytes)] {
            let geometry = Geometry::new(segment_bytes, block_bytes).expect("fits");
            let end = geometry.data + u64::from(geometry.slot_count) * geometry.stride;
            assert!(geometry.slot_count >= 1 && end <= segment_bytes);
            assert!(geometry.data.is_multiple_of(DATA_ALIGN) && geometry.stride.is_multiple_of(SLOT_ALIGN));
            let more = u64::from(geometry.slot_count) + 1;
            assert!(data_start(more) + more * geometry.stride > segment_bytes, "one more does not fit");
        }
    }
}

#[test]
fn only_starts_of_slots_are_places() {
    let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
    let mut headers = std::collections::BTreeSet::new();
    for segment in 0..3 {
        for index in 0..geometry.slot_count {
            let offset = geometry.offset(segment, index).expect("a slot");
            let place = geometry.place(offset).expect("its own");
            assert_eq!((place.segment, place.index), (segment, index));
            assert!(headers.insert(place.header) && place.header.is_multiple_of(64));
            assert!(place.header + SLOT_HEADER_BYTES <= SEGMENT_ALIGN + segment * SEGMENT + geometry.data);
            assert_eq!(geometry.place(offset + 1), Err(LayoutError::Offset(offset + 1)));
            assert_eq!(geometry.place(offset + 512), Err(LayoutError::Offset(offset + 512)));
        }
        assert_eq!(geometry.offset(segment, geometry.slot_count), None);
    }
    assert_eq!(geometry.offset(u64::MAX, 0), None);
    for hostile in [0, 1, SEGMENT_ALIGN - 1, SEGMENT_ALIGN, u64::MAX, u64::MAX - SEGMENT] {
        assert!(geometry.place(hostile).is_err());
    }
}

#[test]
fn sizes_that_fit_nothing_are_refused() {
    for segment_bytes in [0, 1, SEGMENT_ALIGN - 1, 3 << 20, SEGMENT_BYTES_MAX * 2, u64::MAX] {
        assert_eq!(slot_count(segment_bytes, 512), Err(LayoutError::SegmentBytes(segment_bytes)));
    }
    for block_bytes in [0, block_bytes_max(SEGMENT) + 1, u64::MAX] {
        assert!(matches!(slot_count(SEGMENT, block_bytes), Err(LayoutError::BlockBytes { .. })));
    }
}

/// A pool of plain words, read as an engine reads a mapped one.
fn words(fields: &[(u64, u64)]) -> impl Fn(usize) -> u64 + use<> {
    let fields: std::collections::HashMap<u64, u64> = fields.iter().copied().collect();
    move |offset| fields.get(&(offset as u64)).copied().unwrap_or(0)
}

/// The header of a pool of two segments.
const SOUND: [(u64, u64); 5] = [
    (header::MAGIC, MAGIC),
    (header::VERSION, VERSION as u64),
    (header::OLDEST, OLDEST as u64),
    (header::SEGMENT_BYTES, SEGMENT),
    (header::SEGMENTS, 2),
];

/// Returns a copy of a header's words with `value` in the field at offset `field`.
fn with<const N: usize>(mut words: [(u64, u64); N], field: u64, value: u64) -> [(u64, u64); N] {
    words.iter_mut().filter(|(other, _)| *other == field).for_each(|(_, old)| *old = value);
    words
}

#[test]
fn a_view_refuses_a_header_that_does_not_fit_its_mapping() {
    let (sound, len) = (SOUND, pool_bytes(SEGMENT, 2).expect("small"));
    assert!(PoolView::new(words(&sound), len).is_ok());
    assert!(PoolView::new(words(&sound), len - 1).is_err(), "shorter than its segments");
    assert!(PoolView::new(words(&sound), 0).is_err());
    for (field, _) in sound {
        for wrong in [0, 3, u64::MAX] {
            let fields = with(sound, field, wrong);
            let empty = field == header::SEGMENTS && wrong == 0;
            // A later release's file, readable for this release, and an earlier release's file.
            let related = [(header::VERSION, 3), (header::OLDEST, 0)].contains(&(field, wrong));
            assert_eq!(PoolView::new(words(&fields), len).is_ok(), empty || related, "{field} {wrong}");
        }
    }
}

#[test]
fn only_whole_blocks_of_earlier_lives_remain() {
    let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
    let base = segment_offset(SEGMENT, 1).expect("small");
    let header = geometry.place(geometry.offset(1, 2).expect("a slot")).expect("its own").header;
    let [magic, version, oldest, segment_bytes, segments] = SOUND;
    let sound = [
        magic,
        version,
        oldest,
        segment_bytes,
        segments,
        (base + segment::MAGIC, SEGMENT_MAGIC),
        (base + segment::BLOCK_BYTES, 10_000),
        (base + segment::SLOT_COUNT, geometry.slot_count.into()),
        (header + slot::STATE, COMMITTED),
        (header + slot::GENERATION, first_generation(2) + 7),
        (header + slot::GROUP, 3),
        (header + slot::LENGTH, 10_000),
        (header + slot::CHECKSUM, 9),
    ];
    let len = pool_bytes(SEGMENT, 2).expect("small");
    let with = |field, value| PoolView::new(words(&with(sound, field, value)), len).expect("a sound pool");
    let remains = |view: &PoolView<_>| view.remains(1, &geometry, 2, 3).expect("a slot");
    let whole = with(0, MAGIC);
    assert_eq!((whole.geometry(1), whole.geometry(0), whole.geometry(2)), (Some(geometry), None, None));
    assert!(matches!(remains(&whole), Remains::Block { group: 3, .. }), "{:?}", remains(&whole));
    assert_eq!(whole.remains(1, &geometry, 3, 3), Some(Remains::Free));
    assert_eq!(whole.remains(2, &geometry, 2, 3), None);
    for (field, wrong) in [
        (slot::STATE, FILLING),
        (slot::STATE, 3),
        (slot::GENERATION, 0),
        (slot::GENERATION, first_generation(3)),
        (slot::GENERATION, u64::MAX),
        (slot::GROUP, 1 << 32),
        (slot::LENGTH, 10_001),
        (slot::CHECKSUM, 0),
    ] {
        let found = remains(&with(header + field, wrong));
        assert!(matches!(found, Remains::Debris { .. }), "{field} {wrong}: {found:?}");
    }
    for (field, wrong) in [(segment::MAGIC, 0), (segment::BLOCK_BYTES, 0), (segment::SLOT_COUNT, 1)] {
        assert_eq!(with(base + field, wrong).geometry(1), None, "{field} {wrong}");
    }
}

#[test]
fn a_slot_verifies_only_committed_in_its_generation_and_inside_the_pool() {
    let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
    let slot = SlotRef { offset: geometry.offset(1, 2).expect("a slot"), generation: 5 };
    let header = geometry.place(slot.offset).expect("a slot").header;
    let pool = |state| words(&[(header + slot::STATE, state), (header + slot::GENERATION, 5)]);
    assert!(verify(pool(COMMITTED), SEGMENT, 2, slot, 10_000));
    assert!(!verify(pool(FILLING), SEGMENT, 2, slot, 10_000));
    assert!(!verify(pool(FREE), SEGMENT, 2, slot, 10_000));
    assert!(!verify(pool(COMMITTED), SEGMENT, 1, slot, 10_000), "past the last segment");
    assert!(!verify(pool(COMMITTED), SEGMENT, 2, SlotRef { generation: 4, ..slot }, 10_000));
    assert!(!verify(pool(COMMITTED), SEGMENT, 2, SlotRef { offset: slot.offset + 8, ..slot }, 10_000));
    assert!(!verify(pool(COMMITTED), 0, 2, slot, 10_000));
}
