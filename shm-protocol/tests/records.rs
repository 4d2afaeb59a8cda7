//! Readers of a peer's bytes: each written record comes back, and no bytes make a reader panic.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::strategy::Union;

use shm_protocol::handshake::{
    self, BlockRegion, CUTS_MAX, Copier, CudaAllocation, CudaMemory, DESCRIPTORS_MAX, HandshakeError, Hello,
    HelloDigest, RANKS_MAX, RECORD_BYTES_MAX, REGIONS_MAX, Reply, Role, Welcome, WorkerHello,
};
use shm_protocol::layout::{
    LOAD_PREFERENCE_MAX, LOAD_WAIT_MS_MAX, PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX, STAGING_SLOTS_MAX,
    STAGING_WORDS_BYTES,
};
use shm_protocol::message::{Kind, Message, OUTCOME_VALUE_MAX, Outcome, Saved, Slot, Status};
use shm_protocol::namespace;
use shm_protocol::versions::{RELEASE, Versions};
use shm_protocol::{PROTOCOL_OLDEST, PROTOCOL_VERSION};

// === strategies ===

fn messages() -> impl Strategy<Value = Message> {
    let head = (prop::sample::select(&Kind::ALL[..]), any::<u8>(), any::<u32>(), any::<u64>());
    let tail = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<[u32; 6]>());
    (head, tail).prop_map(|((kind, flags, log, op), (from, count, step, lease, data))| Message {
        kind,
        flags,
        log,
        op,
        from,
        count,
        step,
        lease,
        data,
    })
}

prop_compose! {
    fn regions(descriptors: u32)(
        fd in 0..descriptors,
        offset in 0..1_u64 << 40,
        bytes in 1..1_u64 << 28,
        gap in 0..1_u64 << 28,
    ) -> BlockRegion {
        BlockRegion { fd, offset, stride: bytes + gap, bytes }
    }
}

fn digests() -> impl Strategy<Value = Option<HelloDigest>> {
    prop::option::of(any::<[u8; 16]>().prop_map(HelloDigest))
}

prop_compose! {
    fn workers(world_size: u32, descriptors: u32)(
        rank in 0..world_size,
        shards in (1..=world_size).prop_filter("a divisor", move |shards| world_size.is_multiple_of(*shards)),
        blocks in 1..=u32::MAX,
        regions in vec(regions(descriptors), 1..40),
        copy in prop::sample::select(&[Copier::Engine, Copier::Sidecar][..]),
        facts in btree_map(".{0,20}", ".{0,40}", 0..20),
        expects in prop::option::of("[0-9a-f]{32}"),
        live_weights in digests(),
        proves in any::<bool>(),
    ) -> WorkerHello {
        WorkerHello { rank, shard: rank / (world_size / shards), shards, blocks, regions, copy, facts, expects, live_weights, proves, cuda: None, staging: None }
    }
}

prop_compose! {
    /// The same rank with its memory on a GPU.
    fn cuda_workers(world_size: u32, memories: u32)(
        worker in workers(world_size, memories),
        uuid in any::<[u8; 16]>(),
        pid in any::<u32>(),
        handles in vec((vec(any::<u8>(), 64), 0..1_u64 << 40), memories as usize),
        inner in vec(any::<prop::sample::Index>(), 0..CUTS_MAX),
    ) -> WorkerHello {
        let block_bytes = worker.block_bytes().unwrap();
        let allocation = |(number, (handle, spare)): (u32, (Vec<u8>, u64))| CudaAllocation {
            handle: handle.try_into().unwrap(),
            bytes: worker.descriptor_bytes(number) + spare,
        };
        let allocations = (0..).zip(handles).map(allocation).collect();
        let inner = inner.iter().map(|at| at.index(block_bytes as usize) as u64);
        let cuts: BTreeSet<u64> = inner.filter(|cut| *cut > 0).chain([block_bytes]).collect();
        let cuda = CudaMemory { uuid, pid, allocations, cuts: cuts.into_iter().collect() };
        WorkerHello { copy: Copier::Sidecar, cuda: Some(cuda), ..worker }
    }
}

prop_compose! {
    /// The same rank with memory out of the sidecar's reach.
    fn staged_workers(world_size: u32)(
        worker in workers(world_size, 1),
        slots in 1..=STAGING_SLOTS_MAX as u32,
        region in regions(1),
    ) -> WorkerHello {
        let region = BlockRegion { offset: region.offset.max(STAGING_WORDS_BYTES as u64), ..region };
        WorkerHello { copy: Copier::Engine, staging: Some(slots), regions: vec![region], ..worker }
    }
}

/// A sound HELLO and its number of descriptors.
fn hellos() -> impl Strategy<Value = (Hello, usize)> {
    let scheduler = ("[a-z0-9_-]{1,256}", 1..=RANKS_MAX, any::<[u8; 16]>())
        .prop_map(move |(engine, world_size, run)| Hello::new(engine, world_size, Role::Scheduler { run }));
    let wait = |most| prop::option::of(0..=most);
    let waits = (wait(QUERY_WAIT_MS_MAX), wait(PROMISED_WAIT_MS_MAX), wait(QUERY_WAIT_MS_MAX));
    let scheduler =
        (scheduler, waits).prop_map(|(hello, (miss_wait_ms, handover_wait_ms, promise_wait_ms))| {
            // Derived from the other waits, because their limits differ.
            let (wait_max_ms, load_preference) = (handover_wait_ms.map(|ms| ms * 20), miss_wait_ms);
            let waits = Hello { wait_max_ms, load_preference, ..hello };
            (Hello { miss_wait_ms, handover_wait_ms, promise_wait_ms, ..waits }, 0)
        });
    let worker = ("[a-z0-9_-]{1,256}", 1..=RANKS_MAX, 1..=8_u32)
        .prop_flat_map(|(engine, world_size, fds)| {
            (Just(engine), Just(world_size), workers(world_size, fds), Just(fds))
        })
        .prop_map(move |(engine, world, worker, fds)| {
            (Hello::new(engine, world, Role::Worker(worker)), fds as usize)
        });
    let on_gpu = ("[a-z0-9_-]{1,256}", 1..=RANKS_MAX, 1..=8_u32)
        .prop_flat_map(|(engine, world, memories)| (Just(engine), Just(world), cuda_workers(world, memories)))
        .prop_map(move |(engine, world, worker)| (Hello::new(engine, world, Role::Worker(worker)), 0));
    let staged = ("[a-z0-9_-]{1,256}", 1..=RANKS_MAX)
        .prop_flat_map(|(engine, world)| (Just(engine), Just(world), staged_workers(world)))
        .prop_map(move |(engine, world, worker)| (Hello::new(engine, world, Role::Worker(worker)), 1));
    let any_role = Union::new([scheduler.boxed(), worker.boxed(), on_gpu.boxed(), staged.boxed()]);
    (any_role, ".{1,16}", prop::option::of(0..=PROTOCOL_VERSION), digests()).prop_map(
        |((hello, descriptors), release, oldest, groups)| {
            (Hello { release, oldest, groups, ..hello }, descriptors)
        },
    )
}

fn replies() -> impl Strategy<Value = Reply> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>());
    let welcome = (numbers, "[0-9a-f]{32}", prop::option::of(".{0,200}"), any::<[bool; 6]>()).prop_map(
        |(
            (epoch, session, lease_ttl_ms, pool_bytes, segment_bytes),
            ns,
            note,
            [handover, tails, states, devices, hints, streams],
        )| {
            let version = PROTOCOL_VERSION;
            Reply::Welcome(Welcome {
                version,
                release: RELEASE.into(),
                epoch,
                session,
                lease_ttl_ms,
                pool_bytes,
                segment_bytes,
                namespace: ns,
                note,
                handover,
                tails,
                states,
                devices,
                hints,
                streams,
            })
        },
    );
    let refused = ".{0,200}".prop_map(|reason| Reply::Refused { version: PROTOCOL_VERSION, reason });
    Union::new([welcome.boxed(), refused.boxed()])
}

// === ring slots and table words ===

proptest! {
    #[test]
    fn a_message_survives_its_slot(message in messages()) {
        prop_assert_eq!(Message::decode_slot(&message.encode_slot()), Ok(message));
    }

    #[test]
    fn any_slot_decodes_to_itself_or_is_refused(slot in any::<Slot>()) {
        let [kind, _, pad_low, pad_high, ..] = slot[0].to_le_bytes();
        match Message::decode_slot(&slot) {
            Ok(message) => {
                let mut again = message.encode_slot();
                again[0] |= u64::from(pad_low) << 16 | u64::from(pad_high) << 24;
                prop_assert_eq!(again, slot, "every field but the padding comes back");
            }
            Err(_) => prop_assert!(kind == 0 || kind > 11),
        }
    }

    #[test]
    fn sixteen_bytes_survive_a_message(bytes in any::<[u8; 16]>()) {
        let message = Message::new(Kind::Join).with_bytes16(bytes);
        prop_assert_eq!(Message::decode_slot(&message.encode_slot()).unwrap().bytes16(), bytes);
    }

    #[test]
    fn an_outcome_survives_its_word(
        op in any::<u32>(),
        value in 0..=OUTCOME_VALUE_MAX,
        status in prop::sample::select(&Status::ALL[..]),
    ) {
        let outcome = Outcome { op, value, status };
        prop_assert_eq!(Outcome::decode(outcome.encode()), Ok(outcome));
    }

    #[test]
    fn any_word_decodes_to_itself_or_is_refused(word in any::<u64>()) {
        match Outcome::decode(word) {
            Ok(outcome) => prop_assert_eq!(outcome.encode(), word),
            Err(_) => prop_assert!(!(1..=8).contains(&(word as u8))),
        }
    }

    #[test]
    fn saved_counts_survive_their_slot(slot in any::<[u64; 8]>()) {
        let [words @ .., _, _] = slot;
        prop_assert_eq!(&Saved::decode_slot(&slot).encode_slot()[..6], words);
    }
}

#[test]
fn every_kind_and_status_has_its_own_number() {
    for (index, kind) in Kind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, index + 1);
        assert_eq!(Kind::try_from(kind as u8), Ok(kind));
    }
    for (index, status) in Status::ALL.into_iter().enumerate() {
        assert_eq!(status as usize, index + 1);
        assert_eq!(Status::try_from(status as u8), Ok(status));
    }
    for unknown in [0, 20, 255] {
        assert!(Kind::try_from(unknown).is_err());
    }
    for unknown in [0, 15, 255] {
        assert!(Status::try_from(unknown).is_err());
    }
}

#[test]
#[should_panic(expected = "2^20")]
fn an_outcome_never_spills_into_the_operation() {
    Outcome { op: 1, value: OUTCOME_VALUE_MAX + 1, status: Status::Ok }.encode();
}

// === handshake ===

proptest! {
    #[test]
    fn a_sound_hello_survives((hello, descriptors) in hellos()) {
        let bytes = handshake::encode_record(&hello);
        prop_assert!(bytes.len() <= RECORD_BYTES_MAX);
        prop_assert_eq!(handshake::encode_hello(&hello, descriptors), Ok(bytes.clone()));
        prop_assert_eq!(handshake::decode_hello(&bytes, descriptors), Ok(hello));
    }

    #[test]
    fn a_reply_survives(reply in replies()) {
        prop_assert_eq!(handshake::decode_reply(&handshake::encode_record(&reply)), Ok(reply));
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in vec(any::<u8>(), 0..2048), descriptors in 0..70_usize) {
        let _ = handshake::decode_hello(&bytes, descriptors);
        let _ = handshake::decode_reply(&bytes);
    }

    #[test]
    fn a_damaged_hello_is_refused_or_within_the_limits(
        (hello, descriptors) in hellos(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = handshake::encode_record(&hello);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(Hello { world_size, role: Role::Worker(worker), .. }) = handshake::decode_hello(&bytes, descriptors) {
            prop_assert!(worker.rank < world_size && worker.shard < worker.shards && worker.shards <= world_size);
            let memories = worker.cuda.as_ref().map_or(descriptors, |cuda| cuda.allocations.len());
            prop_assert!(worker.regions.iter().all(|region| (region.fd as usize) < memories));
            prop_assert!(worker.block_bytes().is_some());
            for fd in 0..memories as u32 {
                prop_assert!(worker.descriptor_bytes(fd) <= i64::MAX as u64);
            }
            if let Some(cuda) = &worker.cuda {
                prop_assert!(descriptors == 0 && worker.copy == Copier::Sidecar);
                prop_assert!(cuda.cuts.is_sorted() && cuda.cuts.last().copied() == worker.block_bytes());
                let held = |(number, memory): (u32, &CudaAllocation)| worker.descriptor_bytes(number) <= memory.bytes;
                prop_assert!((0..).zip(&cuda.allocations).all(held));
            }
        }
    }

    #[test]
    fn a_cut_hello_is_malformed((hello, descriptors) in hellos(), cut in any::<prop::sample::Index>()) {
        let bytes = handshake::encode_record(&hello);
        let short = &bytes[..cut.index(bytes.len())];
        prop_assert!(matches!(handshake::decode_hello(short, descriptors), Err(HandshakeError::Malformed(_))));
    }
}

fn worker_hello() -> (Hello, WorkerHello) {
    let worker = WorkerHello {
        rank: 1,
        shard: 1,
        shards: 2,
        blocks: 100,
        regions: vec![BlockRegion { fd: 0, offset: 0, stride: 4096, bytes: 4096 }],
        copy: Copier::Engine,
        ..WorkerHello::default()
    };
    let role = Role::Worker(worker.clone());
    (Hello::new("engine".into(), 2, role), worker)
}

#[test]
fn every_limit_of_a_staging_segment_names_its_field() {
    let (hello, worker) = worker_hello();
    let region = BlockRegion { offset: STAGING_WORDS_BYTES as u64, ..worker.regions[0] };
    let staged = WorkerHello { staging: Some(4), regions: vec![region], blocks: u32::MAX, ..worker };
    let with = |worker: WorkerHello| Hello { role: Role::Worker(worker), ..hello.clone() };
    assert!(handshake::decode_hello(&handshake::encode_record(&with(staged.clone())), 1).is_ok());
    let end = BlockRegion { stride: 1 << 62, ..region };
    let cases = [
        ("staging", WorkerHello { staging: Some(0), ..staged.clone() }),
        ("staging", WorkerHello { staging: Some(STAGING_SLOTS_MAX as u32 + 1), ..staged.clone() }),
        ("copy", WorkerHello { copy: Copier::Sidecar, ..staged.clone() }),
        ("regions (their number)", WorkerHello { regions: vec![region; 2], ..staged.clone() }),
        (
            "region.offset",
            WorkerHello { regions: vec![BlockRegion { offset: 4095, ..region }], ..staged.clone() },
        ),
        ("region.offset", WorkerHello { regions: vec![end], ..staged.clone() }),
    ];
    for (field, worker) in cases {
        assert_eq!(field_refused(&with(worker), 1), field);
    }
    assert_eq!(field_refused(&with(staged), 2), "descriptors");
}

fn field_refused(hello: &Hello, descriptors: usize) -> &'static str {
    match handshake::decode_hello(&handshake::encode_record(hello), descriptors) {
        Err(HandshakeError::Range { field, .. }) => field,
        other => panic!("expected a field out of range, got {other:?}"),
    }
}

#[test]
fn every_limit_of_hello_names_its_field() {
    let (hello, _) = worker_hello();
    for engine in [String::new(), "x".repeat(257)] {
        assert_eq!(field_refused(&Hello { engine, ..hello.clone() }, 1), "engine (its length)");
    }
    for release in [String::new(), "x".repeat(65)] {
        assert_eq!(field_refused(&Hello { release, ..hello.clone() }, 1), "release (its length)");
    }
    for world_size in [0, RANKS_MAX + 1] {
        assert_eq!(field_refused(&Hello { world_size, ..hello.clone() }, 1), "world_size");
    }
    let (_, worker) = worker_hello();
    let thirds = Hello { world_size: 3, role: Role::Worker(worker), ..hello.clone() };
    assert_eq!(field_refused(&thirds, 1), "shards", "2 shards do not divide 3 ranks");
    let scheduler = Hello { role: Role::Scheduler { run: [0; 16] }, ..hello };
    assert_eq!(field_refused(&scheduler, 1), "descriptors");
    let waits = |ms| Hello { miss_wait_ms: Some(ms), ..scheduler.clone() };
    assert!(handshake::decode_hello(&handshake::encode_record(&waits(QUERY_WAIT_MS_MAX)), 0).is_ok());
    assert_eq!(field_refused(&waits(QUERY_WAIT_MS_MAX + 1), 0), "miss_wait_ms");
    let handover_wait_ms = Some(PROMISED_WAIT_MS_MAX + 1);
    assert_eq!(field_refused(&Hello { handover_wait_ms, ..scheduler.clone() }, 0), "handover_wait_ms");
    let promise_wait_ms = Some(QUERY_WAIT_MS_MAX + 1);
    assert_eq!(field_refused(&Hello { promise_wait_ms, ..scheduler.clone() }, 0), "promise_wait_ms");
    let wait_max_ms = Some(LOAD_WAIT_MS_MAX + 1);
    assert_eq!(field_refused(&Hello { wait_max_ms, ..scheduler.clone() }, 0), "wait_max_ms");
    let load_preference = Some(LOAD_PREFERENCE_MAX + 1);
    assert_eq!(field_refused(&Hello { load_preference, ..scheduler.clone() }, 0), "load_preference");
}

#[test]
fn every_limit_of_a_worker_names_its_field() {
    let (hello, worker) = worker_hello();
    let region = worker.regions[0];
    let one_region = |region| vec![region];
    let facts = (0..257).map(|i| (i.to_string(), String::new())).collect();
    let cases: Vec<(&str, WorkerHello)> = vec![
        ("rank", WorkerHello { rank: 2, ..worker.clone() }),
        ("shards", WorkerHello { shards: 0, shard: 0, ..worker.clone() }),
        ("shards", WorkerHello { shards: 3, ..worker.clone() }),
        ("shard", WorkerHello { shard: 2, ..worker.clone() }),
        ("shard", WorkerHello { shard: 0, ..worker.clone() }),
        ("expects (its hex digits)", WorkerHello { expects: Some("a".repeat(31)), ..worker.clone() }),
        ("expects (its hex digits)", WorkerHello { expects: Some("A".repeat(32)), ..worker.clone() }),
        ("expects (its hex digits)", WorkerHello { expects: Some("a".repeat(64)), ..worker.clone() }),
        (
            "fact weights_live",
            WorkerHello {
                facts: [("weights_live".into(), "00".into())].into(),
                live_weights: Some(HelloDigest([0; 16])),
                ..worker.clone()
            },
        ),
        ("blocks", WorkerHello { blocks: 0, ..worker.clone() }),
        ("facts (their number)", WorkerHello { facts, ..worker.clone() }),
        ("regions (their number)", WorkerHello { regions: vec![], ..worker.clone() }),
        ("regions (their number)", WorkerHello { regions: vec![region; REGIONS_MAX + 1], ..worker.clone() }),
        ("region.fd", WorkerHello { regions: one_region(BlockRegion { fd: 1, ..region }), ..worker.clone() }),
        (
            "region.bytes",
            WorkerHello { regions: one_region(BlockRegion { bytes: 0, ..region }), ..worker.clone() },
        ),
        (
            "region.stride",
            WorkerHello { regions: one_region(BlockRegion { stride: 4095, ..region }), ..worker.clone() },
        ),
        (
            "region.offset",
            WorkerHello { regions: one_region(BlockRegion { offset: u64::MAX, ..region }), ..worker.clone() },
        ),
        (
            "region.offset",
            WorkerHello { regions: one_region(BlockRegion { stride: u64::MAX, ..region }), ..worker.clone() },
        ),
        (
            "region.offset",
            WorkerHello {
                regions: one_region(BlockRegion { offset: i64::MAX as u64, ..region }),
                ..worker.clone()
            },
        ),
        (
            "bytes of a block",
            WorkerHello {
                blocks: 1,
                regions: one_region(BlockRegion { stride: 1 << 40, bytes: 1 << 40, ..region }),
                ..worker
            },
        ),
    ];
    for (field, worker) in cases {
        let role = Role::Worker(worker);
        assert_eq!(field_refused(&Hello { role, ..hello.clone() }, 1), field);
    }
}

/// The worker of [`worker_hello`] with its memory on a GPU.
fn cuda_hello() -> (Hello, WorkerHello, CudaMemory) {
    let (hello, worker) = worker_hello();
    let allocations = vec![CudaAllocation { handle: [7; 64], bytes: 100 * 4096 }];
    let cuda = CudaMemory { uuid: [3; 16], pid: 7, allocations, cuts: vec![1024, 4096] };
    (hello, WorkerHello { copy: Copier::Sidecar, cuda: Some(cuda.clone()), ..worker }, cuda)
}

#[test]
fn every_limit_of_gpu_memory_names_its_field() {
    let (hello, worker, cuda) = cuda_hello();
    let role = |worker: WorkerHello| Hello { role: Role::Worker(worker), ..hello.clone() };
    let with = |cuda: CudaMemory| role(WorkerHello { cuda: Some(cuda), ..worker.clone() });
    let sound = handshake::decode_hello(&handshake::encode_record(&role(worker.clone())), 0);
    assert_eq!(sound, Ok(role(worker.clone())));
    assert_eq!(field_refused(&role(worker.clone()), 1), "descriptors", "no descriptor is sent beside it");
    let elsewhere = vec![BlockRegion { fd: 1, ..worker.regions[0] }];
    assert_eq!(field_refused(&role(WorkerHello { regions: elsewhere, ..worker.clone() }), 0), "region.fd");
    assert_eq!(field_refused(&role(WorkerHello { copy: Copier::Engine, ..worker.clone() }), 0), "copy");
    let one = &cuda.allocations[0];
    let many = vec![one.clone(); DESCRIPTORS_MAX + 1];
    assert_eq!(
        field_refused(&with(CudaMemory { allocations: many, ..cuda.clone() }), 0),
        "allocations (their number)"
    );
    let none = CudaMemory { allocations: vec![], ..cuda.clone() };
    assert_eq!(field_refused(&with(none), 0), "region.fd", "every region names an allocation");
    let small = vec![CudaAllocation { bytes: one.bytes - 1, ..one.clone() }];
    assert_eq!(
        field_refused(&with(CudaMemory { allocations: small, ..cuda.clone() }), 0),
        "allocation.bytes"
    );
    let too_many = (1..=CUTS_MAX as u64).chain([4096]).collect();
    for cuts in [vec![], too_many] {
        assert_eq!(field_refused(&with(CudaMemory { cuts, ..cuda.clone() }), 0), "cuts (their number)");
    }
    for cuts in [vec![0, 4096], vec![2048, 1024, 4096], vec![1024, 1024, 4096]] {
        assert_eq!(field_refused(&with(CudaMemory { cuts, ..cuda.clone() }), 0), "cuts (the first)");
    }
    for cuts in [vec![4095], vec![1024, 4097]] {
        assert_eq!(field_refused(&with(CudaMemory { cuts, ..cuda.clone() }), 0), "cuts (the last)");
    }
}

#[test]
fn names_and_handles_have_their_own_length() {
    #[derive(serde::Serialize)]
    struct Allocation {
        handle: ciborium::Value,
        bytes: u64,
    }
    let decode = |bytes: usize| {
        let allocation = Allocation { handle: ciborium::Value::Bytes(vec![7; bytes]), bytes: 1 };
        let encoded = handshake::encode_record(&allocation);
        ciborium::from_reader::<CudaAllocation, _>(encoded.as_slice())
    };
    assert_eq!(decode(64).unwrap().handle, [7; 64]);
    for wrong in [0, 63, 65] {
        let text = decode(wrong).unwrap_err().to_string();
        assert!(text.contains("64 bytes"), "{text}");
    }
}

/// A digest of another length is refused.
#[test]
fn a_digest_has_sixteen_bytes() {
    let (hello, _) = worker_hello();
    let bytes = handshake::encode_record(&Hello { groups: Some(HelloDigest([7; 16])), ..hello });
    let at = bytes.windows(17).position(|window| window == [&[0x50][..], &[7; 16]].concat()).unwrap();
    for (head, tail) in [(0x4f, 15), (0x51, 17)] {
        let wrong = [&bytes[..at], &[head], &vec![7; tail], &bytes[at + 17..]].concat();
        let refused = handshake::decode_hello(&wrong, 1).unwrap_err();
        assert!(refused.to_string().contains("16 bytes"), "{refused}");
    }
}

// === versions ===

/// A record of a peer of any release, with a field unknown to this one.
#[derive(serde::Serialize)]
struct Stranger {
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    release: Option<String>,
    unheard_of: Vec<u8>,
}

fn stranger(version: u32, oldest: Option<u32>, release: Option<&str>) -> Stranger {
    Stranger { version, oldest, release: release.map(Into::into), unheard_of: vec![1, 2, 3] }
}

#[test]
fn another_version_is_named_whatever_else_the_record_holds() {
    let (newer, long) = (PROTOCOL_VERSION + 7, "x".repeat(65));
    let cases = [
        (stranger(1, None, None), (1, 1, ""), "version 1 (release not stated)"),
        (stranger(newer, None, Some("9.0")), (newer, newer, "9.0"), "version 10 (release 9.0)"),
        (
            stranger(newer, Some(newer - 1), Some("9.0")),
            (newer, newer - 1, "9.0"),
            "versions 9 to 10 (release 9.0)",
        ),
        (stranger(newer, None, Some(&long)), (newer, newer, ""), "version 10 (release not stated)"),
    ];
    for (record, (version, oldest, release), text) in cases {
        let refusal =
            HandshakeError::Version { theirs: Versions { version, oldest, release: release.into() } };
        assert_eq!(handshake::decode_hello(&handshake::encode_record(&record), 0).as_ref(), Err(&refusal));
        let welcome = handshake::encode_record(&BTreeMap::from([("welcome", record)]));
        let theirs = Versions { version, oldest: version, release: release.into() };
        assert_eq!(handshake::decode_reply(&welcome), Err(HandshakeError::Version { theirs }));
        let own = format!(
            "this side versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION} (release {RELEASE}): install the same pillion release"
        );
        let refusal = refusal.to_string();
        assert!(refusal.contains(text) && refusal.contains(&own), "{refusal}");
    }
}

#[test]
fn a_later_release_that_speaks_this_version_too_is_understood() {
    let (hello, _) = worker_hello();
    let later = Hello { version: PROTOCOL_VERSION + 7, oldest: Some(PROTOCOL_VERSION), ..hello };
    let read = handshake::decode_hello(&handshake::encode_record(&later), 1).unwrap();
    assert_eq!(handshake::agree_version(&read.versions()), Ok(PROTOCOL_VERSION));
    // Its Welcome states the agreed version; an `oldest` beside it makes no other version valid.
    let welcome = stranger(PROTOCOL_VERSION + 7, Some(PROTOCOL_VERSION), None);
    let reply = handshake::encode_record(&BTreeMap::from([("welcome", welcome)]));
    assert!(matches!(handshake::decode_reply(&reply), Err(HandshakeError::Version { .. })));
}

#[test]
fn a_refusal_of_any_release_is_read() {
    #[derive(serde::Serialize)]
    struct Refusal {
        version: u32,
        reason: &'static str,
        unheard_of: u8,
    }
    for version in [0, 1, PROTOCOL_VERSION, u32::MAX] {
        let refusal = Refusal { version, reason: "no", unheard_of: 7 };
        let reply = handshake::encode_record(&BTreeMap::from([("refused", refusal)]));
        assert_eq!(handshake::decode_reply(&reply), Ok(Reply::Refused { version, reason: "no".into() }));
    }
}

#[test]
fn an_oversized_record_is_not_sent() {
    let (hello, worker) = worker_hello();
    let facts = BTreeMap::from([("model".to_owned(), "m".repeat(RECORD_BYTES_MAX))]);
    let long = Hello { role: Role::Worker(WorkerHello { facts, ..worker }), ..hello };
    let text = handshake::encode_hello(&long, 1).unwrap_err().to_string();
    assert!(text.contains("at most 65536 fit: state shorter facts"), "{text}");
}

#[test]
fn an_oversized_record_is_not_even_read() {
    let bytes = vec![0xa0; RECORD_BYTES_MAX + 1];
    assert_eq!(handshake::decode_hello(&bytes, 0), Err(HandshakeError::Long { bytes: 65537 }));
}

#[test]
fn deep_nesting_ends_in_an_error() {
    let mut bytes = b"\xa2\x67version\x02\x64role\xa1\x69scheduler\xa1\x63run".to_vec();
    bytes.extend(std::iter::repeat_n(0x81, 60_000));
    assert!(matches!(handshake::decode_hello(&bytes, 0), Err(HandshakeError::Malformed(_))));
}

// === namespaces ===

proptest! {
    #[test]
    fn facts_in_any_order_make_one_namespace(facts in vec((".{0,10}", ".{0,10}"), 1..10)) {
        let forward: BTreeMap<_, _> = facts.iter().cloned().collect();
        let mut changed = forward.clone();
        changed.insert("one more".into(), "fact".into());
        prop_assert_ne!(namespace::digest_facts(&forward), namespace::digest_facts(&changed));
        let again: BTreeMap<_, _> = forward.clone().into_iter().rev().collect();
        prop_assert_eq!(namespace::digest_facts(&forward), namespace::digest_facts(&again));
    }

    #[test]
    fn a_salt_changes_the_namespace(facts in btree_map(".{0,4}", ".{0,4}", 0..4), salts in any::<[[u8; 16]; 2]>()) {
        let plain = namespace::digest_facts(&facts);
        let [first, second] = salts.map(|salt| namespace::salt_namespace(plain, salt));
        prop_assert!(first != plain && second != plain);
        prop_assert_eq!(first == second, salts[0] == salts[1]);
    }
}
