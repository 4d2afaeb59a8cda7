//! Typed requests: each written request is read again, and no value beyond a bound is read.

use proptest::prelude::*;

use shm_protocol::layout::{CHUNK_KEYS, CHUNKS, LOG_KEYS, LOGS, QUERY_KEYS};
use shm_protocol::message::{APPEND_CHUNKS, Kind, Message, Slot};
use shm_protocol::request::{Append, LoadEnd, LogKeys, Query, RequestError, SchedulerRequest, WorkerRequest};

/// Slots of known kinds, their other fields often small, so many are requests.
fn slots() -> impl Strategy<Value = Slot> {
    let small = |limit: u32| prop_oneof![4 => 0..limit, 1 => any::<u32>()];
    let kinds = prop::sample::select(&Kind::ALL[..]);
    let head = (kinds, prop_oneof![0..16_u8, any::<u8>()], small(LOGS as u32), any::<u64>());
    let range = (small(LOG_KEYS as u32), small(400));
    let data = prop_oneof![
        3 => Just([0; APPEND_CHUNKS]),
        3 => proptest::array::uniform6(0..CHUNKS as u32),
        1 => any::<[u32; APPEND_CHUNKS]>(),
    ];
    (head, range, any::<u64>(), any::<u64>(), data).prop_map(
        |((kind, flags, log, op), (from, count), step, lease, data)| {
            Message { kind, flags, log, op, from, count, step, lease, data }.encode_slot()
        },
    )
}

fn keys_of(request: &SchedulerRequest) -> Option<LogKeys> {
    match request {
        SchedulerRequest::Append(append) => Some(append.keys),
        SchedulerRequest::Query(query) => Some(query.keys),
        SchedulerRequest::Load(load) => Some(load.keys),
        SchedulerRequest::Save(save) => Some(save.keys),
        SchedulerRequest::Hint { keys } => Some(*keys),
        SchedulerRequest::Advise(advise) => Some(advise.keys),
        _ => None,
    }
}

proptest! {
    #[test]
    fn what_is_read_is_within_every_bound_and_survives(slot in slots()) {
        if let Ok(request) = SchedulerRequest::decode_slot(&slot) {
            prop_assert_eq!(SchedulerRequest::decode_slot(&Message::from(request).encode_slot()), Ok(request));
            if let Some(keys) = keys_of(&request) {
                prop_assert!((keys.log as usize) < LOGS && keys.end() as usize <= LOG_KEYS);
                prop_assert_eq!(request.named_count(), keys.count);
            }
            if let SchedulerRequest::Append(append) = request {
                prop_assert!(append.chunks().iter().all(|chunk| (*chunk as usize) < CHUNKS));
            }
            if let SchedulerRequest::Query(Query { keys, .. }) | SchedulerRequest::Hint { keys } = request {
                prop_assert!(keys.count as usize <= QUERY_KEYS);
            }
        }
        if let Ok(request) = WorkerRequest::decode_slot(&slot) {
            prop_assert_eq!(WorkerRequest::decode_slot(&Message::from(request).encode_slot()), Ok(request));
        }
    }

    #[test]
    fn a_kind_is_one_role_s_but_for_weights(slot in slots()) {
        let both = slot[0] as u8 == Kind::Weights as u8;
        let scheduler = SchedulerRequest::decode_slot(&slot);
        let worker = WorkerRequest::decode_slot(&slot);
        let refused = [
            matches!(scheduler, Err(RequestError::Role { sender: "scheduler", .. })),
            matches!(worker, Err(RequestError::Role { sender: "worker", .. })),
        ];
        prop_assert!(if both { refused == [false; 2] } else { refused[0] != refused[1] }, "{scheduler:?} {worker:?}");
    }

    #[test]
    fn an_append_s_parts_are_its_keys(from in 0..(LOG_KEYS - 400) as u32, count in 1..321_u32) {
        let keys = LogKeys::new(3, from..from + count);
        let append = Append { keys, chunks: std::array::from_fn(|at| at as u32 + 100), promised: from % 2 == 1, tail: from % 4 > 1 };
        prop_assert_eq!(SchedulerRequest::decode_slot(&Message::from(SchedulerRequest::Append(append)).encode_slot()), Ok(SchedulerRequest::Append(append)));
        let first = from as usize / CHUNK_KEYS;
        let places = append.parts().flat_map(|part| {
            (part.index..part.index + part.count).map(move |index| (part.chunk, index))
        });
        let expected = (from as usize..keys.end() as usize).map(|key| ((key / CHUNK_KEYS - first + 100) as u32, key % CHUNK_KEYS));
        prop_assert!(places.eq(expected));
    }
}

fn refused(message: Message) -> String {
    SchedulerRequest::decode_slot(&message.encode_slot()).unwrap_err().to_string()
}

fn is_taken(message: Message) -> bool {
    SchedulerRequest::decode_slot(&message.encode_slot()).is_ok()
}

/// Each bound: the last valid message, the first invalid one, and the error for it.
#[test]
fn every_bound_is_kept_to_the_last_value() {
    let of = Message::new;
    let (logs, log_keys, query_keys) = (LOGS as u32, LOG_KEYS as u32, QUERY_KEYS as u32);
    let append = Message { count: 1, ..of(Kind::Append) };
    let last = |data| Message { data, ..append };
    let (known, unknown) = (CHUNKS as u32 - 1, CHUNKS as u32);
    let flagged = |kind, flags| Message { flags, ..of(kind) };
    let replacing = |place| Message { from: 2, data: [0, place, 0, 0, 0, 0], ..of(Kind::Save) };
    let bundle = |bundle, set| Message { data: [bundle, set, 7, 7, 7, 7], ..of(Kind::Open) };
    let cases = [
        (bundle(0, 0), bundle(1, 0), "OPEN with bundle 1: this release serves one bundle"),
        (bundle(0, 0), bundle(0, 1), "OPEN with set 1: this release serves one bundle"),
        (
            Message { count: 384, ..append },
            Message { count: 385, ..append },
            "APPEND with count 385: at least 1 key, in at most 6 chunks",
        ),
        (
            Message { from: 63, count: 321, ..append },
            Message { from: 63, count: 322, ..append },
            "APPEND with count 322: at least 1 key, in at most 6 chunks",
        ),
        (append, Message { count: 0, ..append }, "APPEND with count 0"),
        (last([known, unknown, 0, 0, 0, 0]), last([unknown, 0, 0, 0, 0, 0]), "APPEND with chunk 16384"),
        (
            Message { count: query_keys, ..of(Kind::Query) },
            Message { count: query_keys + 1, ..of(Kind::Query) },
            "QUERY with count 65537: at most 65,536 keys",
        ),
        (
            Message { count: query_keys, ..of(Kind::Hint) },
            Message { count: query_keys + 1, ..of(Kind::Hint) },
            "HINT with count 65537: at most 65,536 keys",
        ),
        (flagged(Kind::Query, 15), flagged(Kind::Query, 16), "QUERY with flags 16"),
        (flagged(Kind::Load, 31), flagged(Kind::Load, 32), "LOAD with flags 32"),
        (flagged(Kind::Save, 3), flagged(Kind::Save, 4), "SAVE with flags 4"),
        (replacing(2), replacing(3), "SAVE with replaced 3"),
        (Message { op: 1, ..of(Kind::Weights) }, of(Kind::Weights), "WEIGHTS with op 0: numbered from 1 on"),
        (
            Message { count: 4096, ..of(Kind::Golden) },
            Message { count: 4097, ..of(Kind::Golden) },
            "GOLDEN with count 4097: 1 to 4,096 tokens",
        ),
        (Message { count: 1, ..of(Kind::Golden) }, of(Kind::Golden), "GOLDEN with count 0"),
    ];
    for (kept, broken, text) in cases {
        assert!(is_taken(kept), "{kept:?}");
        assert!(refused(broken).starts_with(text), "{}", refused(broken));
    }
    for kind in [Kind::Query, Kind::Load, Kind::Save, Kind::Cancel, Kind::Hint] {
        let at_end = Message { from: log_keys - 1, count: 1, ..of(kind) };
        assert!(is_taken(at_end), "{kind}");
        for (from, count) in [(log_keys, 1), (u32::MAX, 1)] {
            let text = refused(Message { from, count, ..of(kind) });
            let end = u64::from(from) + u64::from(count);
            assert!(text.starts_with(&format!("{kind} with end {end}: ")), "{text}");
        }
    }
    let logged = [Kind::Open, Kind::Query, Kind::Load, Kind::Save, Kind::Release, Kind::Close, Kind::Hint];
    for kind in logged {
        assert!(is_taken(Message { log: logs - 1, ..of(kind) }), "{kind}");
        let text = refused(Message { log: logs, ..of(kind) });
        assert!(text.starts_with(&format!("{kind} with log 65536: ")), "{text}");
    }
}

#[test]
fn an_end_is_ok_or_failed_and_of_a_load_perhaps_a_mismatch() {
    for kind in [Kind::Loaded, Kind::Staged] {
        for flags in 0..=255 {
            let request = WorkerRequest::decode_slot(&Message { flags, ..Message::new(kind) }.encode_slot());
            match flags {
                2 | 3 => assert!(request.is_ok()),
                12 if kind == Kind::Loaded => assert!(request.is_ok()),
                _ => assert!(request.unwrap_err().to_string().contains(&format!("status {flags}: "))),
            }
        }
    }
}

/// Fields outside a kind's list are ignored, for any value.
#[test]
fn unnamed_fields_are_ignored() {
    let full = |kind| Message {
        kind,
        flags: 255,
        log: u32::MAX,
        op: u64::MAX,
        from: u32::MAX,
        count: u32::MAX,
        step: u64::MAX,
        lease: u64::MAX,
        data: [u32::MAX; 6],
    };
    assert_eq!(
        SchedulerRequest::decode_slot(&Message { log: 5, ..full(Kind::Release) }.encode_slot()),
        Ok(SchedulerRequest::Release { log: 5 })
    );
    let salt = SchedulerRequest::Salt { salt: [0xff; 16] };
    assert_eq!(SchedulerRequest::decode_slot(&full(Kind::Salt).encode_slot()), Ok(salt));
    let join = WorkerRequest::Join { run: [0xff; 16], step: u64::MAX };
    assert_eq!(WorkerRequest::decode_slot(&full(Kind::Join).encode_slot()), Ok(join));
    let weights = WorkerRequest::Weights { number: u64::MAX, answers: u64::MAX, live: [0xff; 16] };
    assert_eq!(WorkerRequest::decode_slot(&full(Kind::Weights).encode_slot()), Ok(weights));
    let loaded = Message { flags: 2, op: 9, ..full(Kind::Loaded) };
    assert_eq!(
        WorkerRequest::decode_slot(&loaded.encode_slot()),
        Ok(WorkerRequest::Loaded { op: 9, end: LoadEnd::Whole })
    );
}

#[test]
fn advice_has_an_action_and_its_time() {
    let advising =
        |action, seconds| Message { data: [action, seconds, 0, 0, 0, 0], ..Message::new(Kind::Advise) };
    let most = QUERY_KEYS as u32;
    let cases = [
        (advising(1, 3600), advising(1, 3601), "ADVISE with seconds 3601"),
        (advising(2, 1), advising(2, 0), "ADVISE with seconds 0"),
        (advising(3, 0), advising(4, 1), "ADVISE with seconds 1"),
        (advising(4, 0), advising(5, 0), "ADVISE with action 5"),
        (advising(3, 0), advising(0, 0), "ADVISE with action 0"),
        (
            Message { count: most, ..advising(3, 0) },
            Message { count: most + 1, ..advising(3, 0) },
            "ADVISE with count 65537: at most 65,536 keys",
        ),
        (
            Message { flags: 1, ..advising(3, 0) },
            Message { flags: 2, ..advising(3, 0) },
            "ADVISE with flags 2",
        ),
    ];
    for (kept, broken, text) in cases {
        assert!(is_taken(kept), "{kept:?}");
        assert!(refused(broken).starts_with(text), "{}", refused(broken));
    }
}
