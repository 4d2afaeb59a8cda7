//! Sessions of engine processes that connect and hang up.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use copy_engine::HostMemory;
use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::region::Access;
use shm_protocol::session::SessionMemory;
use sidecar::clients::session::ClientSession;
use sidecar::copiers::Copiers;
use sidecar::core::{Action, CoreEvent, SessionId};

use super::copies::Rank;
use super::{Life, Peer};
use crate::connection::{Connection, Socket};
use crate::ctx::{Ctx, Dial};

// === impl Life: peers ===

impl Life {
    /// Begins the session of a process after its hello.
    pub(super) fn admit(&mut self, dial: Dial, ctx: &mut Ctx) {
        dial.pending.set(false);
        let id = self.next_session;
        self.next_session += 1;
        let Dial { hello, kv, fresh, .. } = dial;
        let (_, memory) =
            SessionMemory::create(PROTOCOL_VERSION, self.epoch, id).expect("memory for a session");
        let (lost, hung_up) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let socket = Rc::new(Socket { lost: Rc::clone(&lost) });
        let rank = kv.map(|kv| {
            let (words, stopped) = (memory.clone(), Cell::new(false));
            Rc::new(Rank { kv, words, stopped, _socket: Rc::clone(&socket) })
        });
        let session = self.session(&memory, rank.is_some());
        let engine = hello.engine.clone();
        let connection = Connection {
            memory: memory.clone(),
            epoch: self.epoch,
            lease_ttl_ms: ctx.knobs.lease_ttl_ms,
            lost,
            hung_up: Rc::clone(&hung_up),
            bell: Rc::clone(&ctx.bell),
            pool: Rc::clone(&self.map),
        };
        self.handle(CoreEvent::Connected { session: id, hello: Box::new(hello) }, ctx);
        let logs = BTreeMap::new();
        let peer = Peer {
            session,
            rank,
            _socket: socket,
            hung_up,
            engine,
            salt: None,
            contradicted: Default::default(),
            logs,
            asked: BTreeMap::new(),
        };
        self.sessions.insert(id, peer);
        let refused =
            self.out.iter().any(|action| matches!(action, Action::Close { session, .. } if *session == id));
        if !refused {
            *fresh.borrow_mut() = Some(Rc::new(connection));
        }
    }

    /// The product's session over this memory. Its descriptors are unused: [`Rank`] moves the bytes.
    fn session(&self, memory: &SessionMemory, worker: bool) -> ClientSession {
        let descriptor = || self.null.try_clone().expect("a descriptor");
        let socket = Arc::new(descriptor());
        let rank = worker.then(|| {
            let none = HostMemory::new(Vec::new(), &[], 1, Access::ReadOnly).expect("no memory is sound");
            Copiers::host_rank(none, memory.clone(), Arc::clone(&socket))
        });
        ClientSession::new(memory.clone(), socket, descriptor(), rank)
    }

    /// A session of a process that has hung up.
    pub(super) fn hung_up(&self) -> Option<SessionId> {
        self.sessions.iter().find(|(_, peer)| peer.hung_up.get()).map(|(id, _)| *id)
    }

    /// Cuts a random session, as a broken socket would.
    pub(crate) fn cut(&mut self, scheduler: bool, ctx: &mut Ctx) {
        let may = self.sessions.iter().filter(|(_, peer)| peer.rank.is_none() || !scheduler);
        let ids: Vec<SessionId> = may.map(|(id, _)| *id).collect();
        if !ids.is_empty() {
            self.closing.push(ctx.rng.pick(&ids));
            ctx.hit("fault session cut");
        }
    }
}
