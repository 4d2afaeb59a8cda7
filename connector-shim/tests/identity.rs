//! The separation of KV on the engine's side: changed weights, folded keys, plans of another namespace.

mod peer;

use connector_shim::core::plan::Plan;
use connector_shim::error::ShimError;
use connector_shim::scheduler::{PENDING, SchedulerClient};
use connector_shim::worker::EndedLoad;
use peer::rank::{BLOCK_BYTES, EPOCH, connected, connected_with, content, ended, plan};
use peer::{Peer, Served, eventually, namespace};
use shm_protocol::handshake::{self, Copier};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::layout::header;
use shm_protocol::message::{Kind, LOAD_BY_ENGINE, LOAD_SYNC, Message, Status};
use shm_protocol::namespace::{complete_facts, digest_facts, weights_live};

const OTHER: NamespaceDigest = NamespaceDigest([9; 16]);

fn hash(index: u32) -> BlockHash {
    BlockHash([index as u8; 32])
}

fn log_with(scheduler: &mut SchedulerClient, keys: u32, fold: Option<[u8; 16]>) -> i64 {
    let log = scheduler.open_log(fold);
    assert_eq!(
        scheduler
            .append_keys(log, 0, keys, |index, key| key.set_bytes(&hash(index).0).map_err(ShimError::from))
            .unwrap(),
        keys
    );
    log
}

/// WEIGHTS and JOIN, in their order: kind, number, and step.
fn introduced(served: &mut Served) -> Vec<(Kind, u64, u64)> {
    let kinds = [Kind::Weights, Kind::Join];
    let told = served.drain().into_iter().filter(|message| kinds.contains(&message.kind));
    told.map(|Message { kind, op, step, .. }| (kind, op, step)).collect()
}

// === the scheduler ===

#[test]
fn a_folded_log_has_other_keys_and_the_same_for_the_same_fold() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, mut served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    let folds = [None, Some([1; 16]), Some([1; 16]), Some([2; 16])];
    folds.into_iter().for_each(|fold| _ = log_with(&mut scheduler, 70, fold));
    let appends = served.drain_kind(Kind::Append);
    let last = |append: &Message| served.key(append.data[1], 5);
    let keys: Vec<BlockHash> = appends.iter().map(last).collect();
    assert_eq!(keys[0], hash(69));
    assert_eq!(keys[1], hash(69).folded(&[1; 16]));
    assert!(keys[1] == keys[2] && keys[1] != keys[3] && keys[1] != keys[0]);
}

#[test]
fn weights_end_leases_and_hide_the_namespace_until_they_are_answered() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, mut served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    assert_eq!(scheduler.namespace(), namespace().words()[0]);
    let log = log_with(&mut scheduler, 4, None);
    served.beat();
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Ok, 4);
    assert_eq!(scheduler.wait_for_answer(op), 4);
    scheduler.weights(3);
    assert!(scheduler.post_load(log, 0, &[1, 2, 3, 4], 1, true).is_empty(), "its lease is over");
    scheduler.weights(3);
    scheduler.weights(2);
    assert_eq!(introduced(&mut served), [(Kind::Weights, 3, 0)], "said once");
    assert_eq!(scheduler.namespace(), 0, "what stands there is of the weights before");
    served.bind(3, OTHER);
    assert_eq!(scheduler.namespace(), OTHER.words()[0]);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Ok, 4);
    assert_eq!(scheduler.wait_for_answer(op), 4);
    let plans = scheduler.post_load(log, 0, &[1, 2, 3, 4], 1, true);
    assert_eq!(plans[0].namespace, OTHER.words()[0]);
}

#[test]
fn a_new_sidecar_is_told_of_the_weights_before_anything_else() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    scheduler.weights(2);
    assert!(scheduler.salt());
    let again = peer.serve(BLOCK_BYTES);
    drop(served);
    eventually("reconnect", || {
        scheduler.end_step();
        scheduler.connection_count() == 2
    });
    let mut served = again.join().unwrap();
    let told: Vec<Kind> = served.drain().iter().map(|message| message.kind).collect();
    assert_eq!(told, [Kind::Weights, Kind::Salt]);
    assert_eq!(scheduler.namespace(), 0);
}

#[test]
fn a_barred_engine_misses_and_says_so_once_for_each_change_of_weights() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    let log = log_with(&mut scheduler, 4, None);
    let ask = |scheduler: &mut SchedulerClient, status| {
        served.beat();
        scheduler.end_step();
        let op = scheduler.post_query(log, 0, 4).unwrap();
        served.answer(op, status, 4);
        scheduler.wait_for_answer(op)
    };
    let said = |scheduler: &SchedulerClient| {
        scheduler.take_notices().iter().filter(|notice| notice.contains("PILLION STAYS OUT")).count()
    };
    assert_eq!((ask(&mut scheduler, Status::Barred), ask(&mut scheduler, Status::Barred)), (0, 0));
    assert_eq!(said(&scheduler), 1);
    scheduler.weights(1);
    assert_eq!(ask(&mut scheduler, Status::NotReady), PENDING, "the ranks answer in their next step");
    assert_eq!((ask(&mut scheduler, Status::Barred), said(&scheduler)), (0, 1));
}

// === a rank ===

#[test]
fn a_plan_of_another_namespace_is_not_copied() {
    let (_peer, kv, mut worker, mut served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let other = |op, namespace| Plan { namespace, ..plan(op, LOAD_BY_ENGINE, &[(2, slot), (3, slot)]) };
    assert_eq!(worker.load_now(other(1, OTHER.words()[0])), [2, 3]);
    assert_eq!(worker.load_now(other(2, 0)), [2, 3], "a scheduler that is not bound");
    worker.load_later(other(3, OTHER.words()[0]), 0).unwrap();
    assert_eq!(ended(&mut worker, 1), [EndedLoad { op: 3, failed: vec![2, 3] }]);
    assert!(kv.is_untouched(2) && kv.is_untouched(3));
    let mismatch = Status::Mismatch as u8;
    assert_eq!(served.loaded(), [(1, mismatch), (2, mismatch), (3, mismatch)]);
    let notices = worker.take_notices();
    let [notice] = notices.as_slice() else { panic!("{notices:?}") };
    let digits = |digest: NamespaceDigest| digest.to_string()[..16].to_owned();
    assert!(notice.contains(&digits(OTHER)) && notice.contains(&digits(namespace())), "{notice}");
    assert!(worker.load_now(plan(4, LOAD_BY_ENGINE, &[(2, slot)])).is_empty(), "its own");
}

#[test]
fn what_the_sidecar_copies_of_another_namespace_counts_as_failed() {
    let (_peer, _kv, mut worker, served) = connected(Copier::Sidecar);
    let slot = served.pool.commit(0, 11, &content(1));
    let other = |op, flags| Plan { namespace: OTHER.words()[0], ..plan(op, flags, &[(2, slot)]) };
    served.answer(1, Status::Ok, 1);
    assert_eq!(worker.load_now(other(1, LOAD_SYNC)), [2]);
    worker.load_later(other(2, 0), 0).unwrap();
    assert!(worker.finished().is_empty(), "not before the sidecar is done with the block");
    served.answer(2, Status::Ok, 1);
    assert_eq!(worker.finished(), [EndedLoad { op: 2, failed: vec![2] }]);
    assert_eq!(served.gate(), 0, "nothing was taken back");
}

#[test]
fn a_rank_that_stated_weights_loads_nothing_until_it_is_bound_by_them() {
    let (_peer, _kv, mut worker, mut served) = connected(Copier::Engine);
    let slot = served.pool.commit(0, 11, &content(1));
    let ours = |op| plan(op, LOAD_BY_ENGINE, &[(2, slot)]);
    assert_eq!(worker.namespace(), Some(&(namespace(), peer::facts())));
    worker.set_weights(4, Some([5; 16])).unwrap();
    let told = served.drain_kind(Kind::Weights);
    assert_eq!((told[0].op, told[0].step, told[0].bytes16()), (1, 4, [5; 16]));
    assert_eq!(worker.load_now(ours(1)), [2]);
    assert_eq!(worker.namespace(), None);
    served.bind(1, OTHER);
    assert_eq!(worker.load_now(ours(2)), [2], "the old namespace");
    assert!(worker.load_now(Plan { namespace: OTHER.words()[0], ..ours(3) }).is_empty());
    worker.set_weights(0, None).unwrap();
    worker.set_weights(5, None).unwrap();
    let told = served.drain_kind(Kind::Weights);
    assert_eq!(told.iter().map(|message| (message.op, message.step)).collect::<Vec<_>>(), [(2, 4), (3, 5)]);
    assert_ne!(told[0].bytes16(), told[1].bytes16(), "shared with nobody");
    served.bind(3, namespace());
    assert!(worker.load_now(ours(4)).is_empty(), "equal weights give the old one back");
}

#[test]
fn a_new_sidecar_is_told_what_a_rank_holds_before_it_joins_and_promises_of_the_last_are_kept() {
    let (peer, _kv, mut worker, mut served) = connected(Copier::Engine);
    worker.join([3; 16]);
    worker.set_weights(2, Some([5; 16])).unwrap();
    assert_eq!(introduced(&mut served), [(Kind::Join, 0, 0), (Kind::Weights, 1, 2)]);
    served.bind(1, namespace());
    let promised = plan(1, LOAD_BY_ENGINE, &[(2, served.pool.commit(0, 11, &content(1)))]);
    assert!(worker.load_now(promised.clone()).is_empty());
    drop(served);
    assert!(worker.load_now(promised.clone()).is_empty(), "by a sidecar that is gone");
    let again = peer.serve(BLOCK_BYTES);
    eventually("reconnect", || {
        worker.join([3; 16]);
        worker.connection_count() == 2
    });
    let mut served = again.join().unwrap();
    assert_eq!(introduced(&mut served), [(Kind::Weights, 1, 2), (Kind::Join, 0, 0)]);
    worker.set_weights(3, Some([6; 16])).unwrap();
    assert_eq!(worker.load_now(promised), [2], "of other weights");
}

#[test]
fn a_rank_that_makes_its_namespace_alone_knows_it_from_its_welcome() {
    let (_peer, _kv, mut worker, served) = connected_with(Copier::Engine, |alone| {
        alone.worker.live_weights = Some(handshake::HelloDigest([5; 16]));
    });
    served.store(header::NAMESPACE, 0);
    let facts = complete_facts(&peer::facts(), weights_live([Some([5; 16])]));
    assert_eq!(worker.namespace(), Some(&(digest_facts(&facts), facts)));
    worker.set_weights(1, Some([5; 16])).unwrap();
    assert_eq!(worker.namespace(), None, "not before it is bound anew");
}
