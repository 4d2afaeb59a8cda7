//! Announcements of a peer: messages of its stream, one behind the other, each with its length before it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mesh::control::wire::{FollowReply, REPLY_BYTES_MAX, Reply};
use mesh::feed::{Follower, Heard, PROMISES_MAX};

/// Small enough for a cheap filter.
const KEYS_MAX: usize = 1 << 12;

fuzz_target!(|input: &[u8]| {
    let mut follower = Follower::new(KEYS_MAX);
    let mut rest = input;
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length));
        let Some((message, behind)) = behind.split_at_checked(length) else { return };
        rest = behind;
        assert!(message.len() <= REPLY_BYTES_MAX);
        let Ok(reply) = FollowReply::decode_and_hear(message) else { return };
        let Reply::Told(told) = reply else { continue };
        // A decoded message encodes to itself.
        assert_eq!(FollowReply::from(told.clone()).hear(), Ok(Reply::Told(told.clone())));
        let known = follower.known();
        match follower.hear(told) {
            Ok(Heard::Snapshot(filter)) => {
                assert!(filter.len() <= filter.capacity());
                assert!(follower.known().is_some());
            }
            Ok(Heard::Changes(changes)) => {
                assert!(!changes.is_empty() || follower.known() > known);
                assert!(follower.known() > known, "a delta leads on");
            }
            Ok(Heard::Promises(promises)) => assert!(promises.len() <= PROMISES_MAX),
            Ok(Heard::Nothing) => {}
            Err(_) => return,
        }
    }
});
