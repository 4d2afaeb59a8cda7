//! Frames of the mesh's TCP transport, one behind the other as they lie in a stream.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mesh::transport::tcp::frame::{ASK_BLOCKS_MAX, BODY_BYTES_MAX, Frame, HEAD_BYTES, Head};

fuzz_target!(|input: &[u8]| {
    let mut rest = input;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let Ok(parsed) = Head::parse(head) else { return };
        assert!(parsed.body_bytes() <= BODY_BYTES_MAX);
        let Some((body, behind)) = behind.split_at_checked(parsed.body_bytes()) else { return };
        // A fuzzer does not find checksums, so the body is decoded with the right one.
        let sealed = Head::parse(&sealed(head, body)).expect("only its checksum is another");
        if let Ok(frame) = sealed.decode(body) {
            let mut again = Vec::new();
            frame.encode(&mut again);
            let (head, body) = again.split_first_chunk().expect("a head");
            assert_eq!(Head::parse(head).and_then(|head| head.decode(body)), Ok(frame.clone()));
            if let Frame::Ask(ask) = &frame {
                assert!((1..=ASK_BLOCKS_MAX).contains(&ask.labels.len()));
            }
        }
        if parsed.decode(body).is_err() {
            return;
        }
        rest = behind;
    }
});

/// The head with the right checksum for it and the body.
fn sealed(head: &[u8; HEAD_BYTES], body: &[u8]) -> [u8; HEAD_BYTES] {
    let mut sealed = *head;
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(&head[..16]);
    hash.update(body);
    sealed[16..].copy_from_slice(&hash.digest().to_le_bytes());
    sealed
}
