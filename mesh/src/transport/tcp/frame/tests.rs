use super::lease::{LentPlace, QueueEnd};
use super::*;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn boot(number: u64) -> BootId {
    BootId(NonZeroU64::new(number).unwrap())
}

fn label(number: u8) -> Label {
    Label {
        namespace: NamespaceDigest([number; 16]),
        group: 3,
        hash: BlockHash([number; 32]),
        bytes: 2 << 20,
    }
}

fn frames() -> Vec<Frame> {
    let long = "n".repeat(NODE_BYTES_MAX);
    let hello = HelloFrame { node: node("one"), boot: boot(7), wanted_node: node(&long), wanted_boot: None };
    let block = Block { ticket: 5, index: 2, status: BlockStatus::Absent, bytes: 0, checksum: 0 };
    let ask = |count| AskFrame { ticket: 3, first: 4, labels: vec![label(3); count] };
    let mut frames = vec![
        Frame::Hello(HelloFrame { wanted_boot: Some(boot(9)), ..hello.clone() }),
        Frame::Hello(hello),
        Frame::Welcome(boot(u64::MAX)),
        Frame::Ask(AskFrame { ticket: 1, first: 9, labels: vec![label(1)] }),
        Frame::Ask(AskFrame { ticket: u64::MAX, first: 0, labels: vec![label(2); ASK_BLOCKS_MAX] }),
        Frame::Stand(StandingTerms { patience_ms: PATIENCE_MS_MAX, place: 7 }, ask(ASK_BLOCKS_MAX)),
        Frame::Stand(StandingTerms { patience_ms: 0, place: 0 }, ask(1)),
        Frame::Block(block),
        Frame::Block(Block { status: BlockStatus::Whole, bytes: 2 << 20, checksum: 77, ..block }),
    ];
    frames.extend(
        [BlockStatus::Draining, BlockStatus::Busy].map(|status| Frame::Block(Block { status, ..block })),
    );
    frames.extend(REASONS.map(Frame::Refused));
    frames.push(Frame::Refused(Refusal::Queues { nics: 8, pairs: 2 }));
    frames.extend(leased());
    frames
}

fn leased() -> Vec<Frame> {
    let gid = std::array::from_fn(|byte| byte as u8);
    let end = QueueEnd { number: 9, packet: 0xff_ffff, lid: 7, mtu: 5, reads: 16, gid };
    let queue = QueueOffer { pairs: 2, number: 3, nics: vec![Some(1), None], nic: 1, end, key: u32::MAX };
    let turn = AskId { ticket: 8, first: 4 };
    let place =
        LentPlace { address: u64::MAX - (2 << 20), checksum: 3, bytes: 2 << 20, status: BlockStatus::Whole };
    let absent = LentPlace { address: 0, checksum: 0, bytes: 0, status: BlockStatus::Absent };
    let lent = |places| Frame::Lent(Lent { turn, lease_ms: 5000, places });
    let nics = vec![Some(0); lease::NICS_MAX];
    vec![
        Frame::Queue(QueueOffer { nics, ..queue.clone() }),
        Frame::Queue(queue),
        lent(vec![place, absent]),
        lent(vec![place; ASK_BLOCKS_MAX]),
        Frame::Read(turn),
        Frame::Stood(turn, true),
        Frame::Stood(turn, false),
        Frame::InStream,
    ]
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.append_to(&mut bytes);
    bytes
}

fn decoded(bytes: &[u8]) -> Result<Frame, MalformedFrame> {
    let (head, body) = bytes.split_first_chunk().ok_or(MalformedFrame::Bytes("less than a head"))?;
    Head::parse(head)?.decode_body(body)
}

#[test]
fn what_is_encoded_is_decoded() {
    for frame in frames() {
        assert_eq!(decoded(&encoded(&frame)), Ok(frame));
    }
}

#[test]
fn no_bit_of_a_frame_can_change() {
    for frame in frames() {
        let bytes = encoded(&frame);
        for bit in 0..8 * bytes.len().min(200) {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(decoded(&changed).is_err(), "bit {bit} of {frame:?}");
        }
        assert!(decoded(&bytes[..bytes.len() - 1]).is_err());
        assert!(decoded(&[&bytes[..], &[0]].concat()).is_err());
    }
}

#[test]
fn another_version_is_named_and_its_refusals_are_understood() {
    let with_version = |frame: &Frame, version: u16| {
        let mut bytes = encoded(frame);
        bytes[4..6].copy_from_slice(&version.to_le_bytes());
        let (head, body) = bytes.split_at_mut(HEAD_BYTES);
        let check = compute_check(head.first_chunk().unwrap(), body);
        head[CHECKED_BYTES..].copy_from_slice(&check.to_le_bytes());
        bytes
    };
    assert_eq!(decoded(&with_version(&Frame::Welcome(boot(1)), 2)), Err(MalformedFrame::Version(2)));
    let refused = Frame::Refused(Refusal::Version(2));
    assert_eq!(decoded(&with_version(&refused, 2)), Ok(refused));
}
