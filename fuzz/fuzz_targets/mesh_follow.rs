//! Announcements of a peer: messages of its stream, one behind the other, each with its length before it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mesh::control::wire::{CheckedReply, FollowReply, REPLY_BYTES_MAX};
use mesh::feed::{Follower, FollowerEvent, PROMISES_MAX};

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
        let Ok(reply) = FollowReply::decode_and_validate(message) else { return };
        let CheckedReply::Feed(message) = reply else { continue };
        // A decoded message encodes to itself.
        assert_eq!(FollowReply::from(message.clone()).validate(), Ok(CheckedReply::Feed(message.clone())));
        let known = follower.known();
        match follower.apply_message(message) {
            Ok(FollowerEvent::Snapshot(filter)) => {
                assert!(filter.len() <= filter.capacity());
                assert!(follower.known().is_some());
            }
            Ok(FollowerEvent::Changes(changes)) => {
                assert!(!changes.is_empty() || follower.known() > known);
                assert!(follower.known() > known, "a delta leads on");
            }
            Ok(FollowerEvent::Promises(promises)) => assert!(promises.len() <= PROMISES_MAX),
            Ok(FollowerEvent::Nothing) => {}
            Err(_) => return,
        }
    }
});
