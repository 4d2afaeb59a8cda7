//! The CUDA contexts of engine processes. No GPU is used here.
//!
//! A stuck batch blocks calls of its own context alone: an open, a lock, a close. So every engine process on
//! a GPU has its own context. The first process uses the existing primary context; each further context takes
//! 0.5 GiB of the GPU. CUDA opens the memory of a process in only one context of this process at a time, so
//! all ranks of an engine process share one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The contexts in use.
#[derive(Debug)]
pub(in crate::copiers) struct Contexts<C>(Arc<ContextsShared<C>>);

#[derive(Debug)]
struct ContextsShared<C> {
    /// The lock is held while a context is made, which takes as long as the driver needs.
    tenants: Mutex<Tenants<C>>,
    /// Number of stuck ranks over all processes; the data thread reads it without the lock.
    parked: AtomicUsize,
}

/// By the GPU's UUID and the process id.
type Tenants<C> = BTreeMap<([u8; 16], u32), Tenant<C>>;

/// An engine process on a GPU.
#[derive(Debug)]
struct Tenant<C> {
    context: Arc<C>,
    ranks: usize,
    parked: usize,
}

/// A rank's use of its process's context, given up on drop.
#[derive(Debug)]
pub(super) struct ContextPlace<C> {
    shared: Arc<ContextsShared<C>>,
    tenant: ([u8; 16], u32),
    context: Arc<C>,
    parked: bool,
}

// === impl Contexts ===

impl<C> Contexts<C> {
    pub(in crate::copiers) fn new() -> Self {
        Self(Arc::new(ContextsShared { tenants: Mutex::default(), parked: AtomicUsize::new(0) }))
    }

    /// Number of stuck ranks.
    pub(in crate::copiers) fn parked(&self) -> usize {
        self.0.parked.load(Ordering::Relaxed)
    }

    /// Adds a rank of an engine process. `primary` is the primary context of its GPU, and `make` makes
    /// another. Fails if a rank of the process is stuck.
    pub(super) fn enter_rank(
        &self,
        tenant: ([u8; 16], u32),
        primary: &Arc<C>,
        make: impl FnOnce() -> Result<Arc<C>, String>,
    ) -> Result<ContextPlace<C>, String> {
        let mut tenants = self.0.lock();
        if tenants.get(&tenant).is_some_and(|found| found.parked > 0) {
            return Err(format!(
                "copies into process {} wait behind a gate that it closed: restart that engine",
                tenant.1
            ));
        }
        if !tenants.contains_key(&tenant) {
            let taken = tenants.values().any(|other| Arc::ptr_eq(&other.context, primary));
            let context = if taken { make()? } else { Arc::clone(primary) };
            tenants.insert(tenant, Tenant { context, ranks: 0, parked: 0 });
        }
        let found = tenants.get_mut(&tenant).expect("inserted above");
        found.ranks += 1;
        let context = Arc::clone(&found.context);
        Ok(ContextPlace { shared: Arc::clone(&self.0), tenant, context, parked: false })
    }
}

impl<C> Clone for Contexts<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

// === impl ContextPlace ===

impl<C> ContextPlace<C> {
    pub(super) fn context(&self) -> &Arc<C> {
        &self.context
    }

    /// Marks the rank as stuck. Further ranks of its process are refused until this value is dropped.
    pub(super) fn park(&mut self) {
        if !std::mem::replace(&mut self.parked, true) {
            self.shared.lock().get_mut(&self.tenant).expect("this place is in it").parked += 1;
            self.shared.parked.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<C> Drop for ContextPlace<C> {
    fn drop(&mut self) {
        let mut tenants = self.shared.lock();
        let found = tenants.get_mut(&self.tenant).expect("this place is in it");
        found.ranks -= 1;
        found.parked -= usize::from(self.parked);
        self.shared.parked.fetch_sub(usize::from(self.parked), Ordering::Relaxed);
        if found.ranks == 0 {
            // `self` holds the context until the lock is released: destroying a context takes a while.
            tenants.remove(&self.tenant);
        }
    }
}

// === impl ContextsShared ===

impl<C> ContextsShared<C> {
    fn lock(&self) -> MutexGuard<'_, Tenants<C>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: [u8; 16] = [1; 16];

    fn made() -> Result<Arc<u32>, String> {
        Ok(Arc::new(2))
    }

    #[test]
    fn processes_of_a_gpu_share_no_context_and_ranks_of_one_do() {
        let (contexts, primary) = (Contexts::new(), Arc::new(1));
        let first = contexts.enter_rank((GPU, 10), &primary, made).unwrap();
        let again = contexts.enter_rank((GPU, 10), &primary, made).unwrap();
        let other = contexts.enter_rank((GPU, 11), &primary, made).unwrap();
        assert!(Arc::ptr_eq(first.context(), &primary) && Arc::ptr_eq(again.context(), &primary));
        assert_eq!(**other.context(), 2);
        drop(first);
        assert_eq!(
            **contexts.enter_rank((GPU, 12), &primary, made).unwrap().context(),
            2,
            "a rank is left in it"
        );
        drop(again);
        assert_eq!(
            **contexts.enter_rank((GPU, 12), &primary, made).unwrap().context(),
            1,
            "it is free again"
        );
        let elsewhere = Arc::new(3);
        assert_eq!(**contexts.enter_rank(([2; 16], 10), &elsewhere, made).unwrap().context(), 3);
    }

    #[test]
    fn a_process_with_a_parked_rank_is_let_in_once_that_has_left() {
        let (contexts, primary) = (Contexts::new(), Arc::new(1));
        let mut parked = contexts.enter_rank((GPU, 10), &primary, made).unwrap();
        parked.park();
        parked.park();
        assert_eq!(contexts.parked(), 1);
        let made_slowly = || {
            assert_eq!(contexts.parked(), 1, "the data thread does not wait for a context");
            made()
        };
        drop(contexts.enter_rank((GPU, 12), &primary, made_slowly).unwrap());
        let refused = contexts.enter_rank((GPU, 10), &primary, made).unwrap_err();
        assert!(refused.contains("restart that engine"), "{refused}");
        assert_eq!(
            **contexts.enter_rank((GPU, 11), &primary, made).unwrap().context(),
            2,
            "others are let in"
        );
        drop(parked);
        assert_eq!(contexts.parked(), 0);
        contexts.enter_rank((GPU, 10), &primary, made).unwrap();
    }
}
