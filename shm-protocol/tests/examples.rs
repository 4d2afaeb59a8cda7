//! The worked examples of `PROTOCOL.md`, made by the code they describe: the page must contain them
//! unchanged.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use shm_protocol::handshake::{
    self, BlockRegion, Copier, CudaAllocation, CudaMemory, Hello, Role, WorkerHello,
};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{self, header};
use shm_protocol::message::{Kind, Message, Outcome, Status};
use shm_protocol::request::{Append, LogKeys, Query, RequestError, SchedulerRequest, WorkerRequest};
use shm_protocol::ring::Producer;
use shm_protocol::session::{Ring, SessionMemory};
use shm_protocol::{PROTOCOL_VERSION, gate, namespace};

const PAGE: &str = include_str!("../PROTOCOL.md");

/// Sixteen bytes a line, each line behind its offset.
fn dump(bytes: &[u8], base: usize) -> String {
    let line = |(index, line): (usize, &[u8])| {
        let hex: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{:08x}  {}\n", base + index * 16, hex.join(" "))
    };
    bytes.chunks(16).enumerate().map(line).collect()
}

fn assert_on_page(title: &str, example: &str) {
    assert!(PAGE.contains(example), "PROTOCOL.md must hold this as the example of {title}:\n{example}");
}

fn facts() -> BTreeMap<String, String> {
    BTreeMap::from([("dtype".into(), "bfloat16".into()), ("model".into(), "tiny".into())])
}

#[test]
fn hello_of_a_worker() {
    let worker = WorkerHello {
        rank: 0,
        shard: 0,
        shards: 1,
        blocks: 128,
        regions: vec![BlockRegion { fd: 0, offset: 0, stride: 16384, bytes: 8192 }],
        copy: Copier::Engine,
        facts: facts(),
        ..WorkerHello::default()
    };
    // The release of the page's example.
    let hello = Hello { release: "0.3.0".into(), ..Hello::new("e0".into(), 1, Role::Worker(worker)) };
    assert_on_page("a HELLO", &dump(&handshake::encode_record(&hello), 0));
}

#[test]
fn cuda_of_a_worker() {
    let uuid = std::array::from_fn(|index| index as u8);
    let allocations = vec![CudaAllocation { handle: [0x11; 64], bytes: 2_097_152 }];
    let cuda = CudaMemory { uuid, pid: 4321, allocations, cuts: vec![4096, 8192] };
    assert_on_page("GPU memory", &dump(&handshake::encode_record(&cuda), 0));
}

#[test]
fn namespace_of_the_facts() {
    let digest = namespace::digest_facts(&facts());
    assert_on_page("a namespace", &format!("`{digest}`"));
    assert_on_page("a namespace's line", &namespace::format_facts(&facts()));
    assert_on_page("a salted namespace", &format!("`{}`", namespace::salt_namespace(digest, [0x5a; 16])));
}

#[test]
fn append_and_query_in_a_session_memory() {
    let (_fd, memory) = SessionMemory::create(PROTOCOL_VERSION, 0, 0).unwrap();
    let mut submissions = Producer::new(memory.ring(Ring::Submission));
    let key = |index: u32| BlockHash::from_slice(&[index as u8; 16]).unwrap();
    (0..2).for_each(|index| memory.write_key(5, index, &key(0xa0 + index as u32)));
    let keys = LogKeys::new(7, 0..2);
    let open = SchedulerRequest::Open { log: 7 };
    let append =
        SchedulerRequest::Append(Append { keys, chunks: [5, 0, 0, 0, 0, 0], promised: false, tail: false });
    let query = SchedulerRequest::Query(Query::new(1, keys));
    for message in [open, append, query].map(Message::from) {
        assert!(submissions.has_room(layout::SUBMISSION_RESERVED as u32).unwrap());
        submissions.push(&message.encode_slot());
    }
    submissions.publish();
    memory.store_outcome(1, Outcome { op: 1, value: 2, status: Status::Ok });

    let bytes = |offset: usize, count: usize| -> Vec<u8> {
        let words = memory.region().words64(offset, count / 8);
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    };
    let at = |offset, count| dump(&bytes(offset, count), offset);
    assert_on_page("two keys in a chunk", &at(layout::key_offset(5, 0), 64));
    assert_on_page("OPEN, APPEND, QUERY", &at(layout::SUBMISSION, 192));
    assert_on_page("the tail", &at(header::SUBMISSION_TAIL, 8));
    assert_on_page("the outcome", &at(layout::TABLE + 8, 8));
}

#[test]
fn gate_and_load_words_of_a_load() {
    let (_fd, memory) = SessionMemory::create(PROTOCOL_VERSION, 0, 0).unwrap();
    gate::close_gate(memory.region(), 5);
    let at = layout::gate_word(5);
    let word = memory.region().word64(at).load(Ordering::Relaxed);
    assert_on_page("the gate of load 5 once it is closed", &dump(&word.to_le_bytes(), at));
    assert_on_page("what load 5 waits for", &format!("`{:#x}`", gate::value_open_for(5)));
    let (at, value) = (layout::load_word(6), layout::load_word_value(6, 2));
    assert_on_page("the load word of two cuts of load 6", &dump(&value.to_le_bytes(), at));
}

/// The offsets in the page's tables are those of the layout.
#[test]
fn offsets_of_the_page() {
    let rows = [
        ("submission ring", layout::SUBMISSION),
        ("completion ring", layout::COMPLETION),
        ("completion table", layout::TABLE),
        ("block-id arena", layout::BLOCK_ID_ARENA),
        ("key arena", layout::KEY_ARENA),
        ("load words", layout::LOAD_WORDS),
        ("gates", layout::GATES),
        ("end", layout::SESSION_BYTES),
        ("`SIDECAR_HEARTBEAT`", header::SIDECAR_HEARTBEAT),
        ("`SIDECAR_ASLEEP`", header::SIDECAR_ASLEEP),
        ("`ENGINE_WAITING`", header::ENGINE_WAITING),
        ("`SIGNAL`", header::SIGNAL),
        ("`VOID_SAVES_BELOW`", header::VOID_SAVES_BELOW),
        ("`SUBMISSION_TAIL`", header::SUBMISSION_TAIL),
        ("`SUBMISSION_HEAD`", header::SUBMISSION_HEAD),
        ("`COMPLETION_TAIL`", header::COMPLETION_TAIL),
        ("`COMPLETION_HEAD`", header::COMPLETION_HEAD),
        ("`FENCE_START`", header::FENCE_START),
        ("`FENCE_DONE`", header::FENCE_DONE),
        ("`FENCE_COPYING`", header::FENCE_COPYING),
        ("`FENCE_STARTED`", header::FENCE_STARTED),
        ("`FENCE_ENDED`", header::FENCE_ENDED),
        ("`ANNOUNCEMENT_TAIL`", header::ANNOUNCEMENT_TAIL),
        ("`ANNOUNCEMENT_HEAD`", header::ANNOUNCEMENT_HEAD),
        ("`ANNOUNCE`", header::ANNOUNCE),
        ("`PREFILL`", header::PREFILL),
    ];
    for (name, offset) in rows {
        assert_on_page(name, &format!("| {offset} | {name} |"));
    }
}

/// A row for each message and each role that sends it, and one for each status.
#[test]
fn messages_and_statuses_of_the_page() {
    let mut rows = 0;
    for kind in Kind::ALL {
        let slot = Message::new(kind).encode_slot();
        let refused = [SchedulerRequest::decode_slot(&slot).err(), WorkerRequest::decode_slot(&slot).err()];
        for (role, refused) in ["scheduler", "worker"].into_iter().zip(refused) {
            if !matches!(refused, Some(RequestError::Role { .. })) {
                assert_on_page("a message", &format!("\n| {} {kind} | {role} | ", kind as u8));
                rows += 1;
            }
        }
    }
    assert_eq!(
        PAGE.lines().filter(|line| line.contains(" | scheduler | ") || line.contains(" | worker | ")).count(),
        rows
    );
    for status in Status::ALL {
        assert_on_page("a status", &format!("\n| {} {status} | ", status as u8));
    }
    let reserved = Kind::ALL.into_iter().filter(|kind| kind.reserved()).map(Kind::name).collect::<Vec<_>>();
    let (last, first) = reserved.split_last().unwrap();
    let all = format!("submission ring are for {} and {last} only.", first.join(", "));
    assert!(PAGE.split_whitespace().collect::<Vec<_>>().join(" ").contains(&all), "{all}");
}
