//! The scheduler's session and its connections, for the policy.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;

use connector_shim::core::notices::Notices;
use connector_shim::core::policy::host::SessionHost;
use connector_shim::core::scheduler::{BlockChange, EngineSession, SessionConfig};

use super::{Change, Port};
use crate::connection::Connection;
use crate::ctx::Ctx;

#[derive(Debug)]
pub(super) struct Line {
    port: Port,
    session: EngineSession<Rc<Connection>>,
    generation: u64,
}

// === impl Line ===

impl Line {
    pub(super) fn new(config: SessionConfig, port: Port) -> Self {
        Self { port, session: EngineSession::new(config, Arc::new(Notices::default())), generation: 0 }
    }

    /// Dials if there is no connection.
    pub(super) fn dial(&mut self, ctx: &mut Ctx) {
        self.port.dial(ctx);
    }
}

impl Deref for Line {
    type Target = EngineSession<Rc<Connection>>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for Line {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl SessionHost for Line {
    type Connection = Rc<Connection>;

    fn connection_count(&self) -> u64 {
        self.generation
    }

    fn refresh_session(&mut self) {
        match self.port.look() {
            Change::Same => {}
            Change::Lost => self.session.detach(),
            Change::Connected => {
                let connection = self.port.connection.as_ref().expect("it has just come");
                self.session.attach(Rc::clone(connection));
                self.generation += 1;
            }
        }
    }

    fn end_step(&mut self) {
        self.session.end_step().expect("an honest sidecar");
        self.refresh_session();
    }

    fn take_changes(&mut self) -> Vec<BlockChange> {
        let (changes, end) = self.session.take_changes();
        end.expect("an honest sidecar");
        changes
    }
}
