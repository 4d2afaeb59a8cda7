//! Ring slots: decoded as a message, as each role's request, as a save's end, and their first word as an
//! outcome.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shm_protocol::message::{Message, Outcome, Saved, Slot};
use shm_protocol::request::{SchedulerRequest, WorkerRequest};

fuzz_target!(|bytes: [u8; 64]| {
    let slot: Slot =
        std::array::from_fn(|i| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes")));
    if let Ok(request) = SchedulerRequest::decode(&slot) {
        assert_eq!(SchedulerRequest::decode(&Message::from(request).encode()), Ok(request));
    }
    if let Ok(request) = WorkerRequest::decode(&slot) {
        assert_eq!(WorkerRequest::decode(&Message::from(request).encode()), Ok(request));
    }
    if let Ok(message) = Message::decode(&slot) {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
        assert_eq!(message.with_bytes16(message.bytes16()), message);
    }
    if let Ok(outcome) = Outcome::decode(slot[0]) {
        assert_eq!(outcome.encode(), slot[0]);
    }
    assert_eq!(Saved::decode(&slot).encode()[..3], slot[..3]);
});
