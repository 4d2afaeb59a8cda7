//! The effects of a job's end on the log, and the handling of late jobs.

use shm_protocol::key::BlockKey;

use super::breaker::Way;
use super::table::State;
use super::{Errand, Flight, Log};
use crate::list::Spot;
use crate::ssd::{Done, Ended, Fault, FaultKind, Place, Ticket, Work};

/// A device counts as working after a job's end within 1 of so many parts of the time of a late job.
const MOVES_PART: u64 = 5;

impl Log {
    /// Handles a job's end. Returns the consequence for the caller, if there is one.
    pub fn done(&mut self, now_ms: u64, done: Done) -> Option<Ended> {
        self.now_ms = self.now_ms.max(now_ms);
        let flight = self.flights.remove(&done.ticket)?;
        let device = flight.device;
        self.volumes[device].flights -= 1;
        self.volumes[device].moved_ms = self.now_ms;
        self.count(&flight, done.result);
        let ok = done.result.is_ok();
        let ended = match flight.errand {
            Errand::Write { key, slot, place, bytes } => {
                self.written(device, &key, place, bytes, ok);
                Some(Ended::Written { slot, ok })
            }
            Errand::Read { key, slot, place, bytes } => {
                self.was_read(device, &key, place, bytes, done.result);
                Some(Ended::Read { ticket: done.ticket, key, slot, ok })
            }
            Errand::Move { key, from, to, bytes } => {
                self.moved(device, &key, from, to, bytes, ok);
                None
            }
            Errand::Begin { segment } => {
                self.volumes[device].begun(segment, ok);
                None
            }
            Errand::Seal { segment } => {
                self.volumes[device].sealed(segment);
                None
            }
            Errand::Check => {
                self.volumes[device].breaker.checked(ok, self.now_ms);
                None
            }
            Errand::Distrust => {
                self.volumes[device].distrusts.told(ok, self.now_ms);
                self.tell_distrusted(device);
                None
            }
            Errand::GiveUp => None,
        };
        self.issue_wanted(device);
        self.reclaim(device);
        ended
    }

    /// Counts a job's end, for metrics and the breaker.
    fn count(&mut self, flight: &Flight, result: Result<(), Fault>) {
        if matches!(flight.errand, Errand::GiveUp) {
            return;
        }
        let volume = &mut self.volumes[flight.device];
        let way = if matches!(flight.errand, Errand::Read { .. }) { Way::Read } else { Way::Write };
        let fault = match result {
            Ok(()) => return volume.breaker.good(way),
            Err(fault) => fault,
        };
        let Some(kind) = fault.kind() else { return };
        volume.stats.faults[kind as usize] += 1;
        // A damaged block is no sign of other damage, and neither is a failed list of distrusted blocks. A
        // check's end is counted elsewhere.
        let tells = kind != FaultKind::Corrupt && !matches!(flight.errand, Errand::Check | Errand::Distrust);
        if tells && volume.breaker.fault(way, self.now_ms) {
            self.give_up(flight.device);
        }
    }

    /// Gives a broken device up: its queued jobs end, and their slots are free for others.
    fn give_up(&mut self, device: usize) {
        self.issue(device, Errand::GiveUp, Work::GiveUp);
    }

    fn written(&mut self, device: usize, key: &BlockKey, place: Place, bytes: u32, ok: bool) {
        let volume = &mut self.volumes[device];
        volume.write_bytes -= u64::from(bytes);
        volume.written(place.segment, &mut self.wanted);
        if ok {
            volume.stats.written_blocks_total += 1;
            volume.stats.written_bytes_total += u64::from(bytes);
        }
        // The block may have been removed meanwhile.
        let Some(id) = self.still_at(key, device, place) else { return };
        if ok { self.keep(id, Spot::Head) } else { self.forget(id) }
    }

    fn was_read(
        &mut self,
        device: usize,
        key: &BlockKey,
        place: Place,
        bytes: u32,
        result: Result<(), Fault>,
    ) {
        let volume = &mut self.volumes[device];
        volume.segment(place.segment).reads -= 1;
        let moved = matches!(result, Ok(()) | Err(Fault::Corrupt(_)));
        volume.pace.ended(bytes.into(), moved, self.now_ms);
        match result {
            Ok(()) => {
                volume.stats.read_blocks_total += 1;
                volume.stats.read_bytes_total += u64::from(bytes);
            }
            Err(Fault::Stopped) => {}
            Err(_) => {
                if let Some(id) = self.still_at(key, device, place) {
                    self.forget(id);
                }
            }
        }
    }

    fn moved(&mut self, device: usize, key: &BlockKey, from: Place, to: Place, bytes: u32, ok: bool) {
        let volume = &mut self.volumes[device];
        volume.moves -= 1;
        volume.segment(from.segment).reads -= 1;
        volume.written(to.segment, &mut self.wanted);
        // A failed read has taken the block out of the index meanwhile.
        let moving = |id: &u32| self.table.get(*id).state == State::Moving;
        let Some(id) = self.still_at(key, device, from).filter(moving) else { return };
        if !ok {
            self.forget(id);
            return;
        }
        let volume = &mut self.volumes[device];
        volume.stats.moved_blocks_total += 1;
        volume.stats.moved_bytes_total += u64::from(bytes);
        let entry = self.table.get_mut(id);
        (entry.segment, entry.unit, entry.state) = (to.segment, to.unit, State::Kept);
        let units = volume.units(bytes);
        volume.unsettle(from.segment, units);
        volume.settle(to.segment, id, units);
    }

    /// Lets time pass: breakers are tried again, late jobs trip theirs. Newly late reads go to `late`: the
    /// caller answers "miss" to their waiters, while the job owns the slot until its [`Ended::Read`]. A read
    /// is not late while its device ends other jobs.
    pub fn tick(&mut self, now_ms: u64, late: &mut Vec<Ticket>) {
        self.now_ms = self.now_ms.max(now_ms);
        // A device is not late for a time without ticks: this process stood still.
        if self.now_ms - self.ticked_ms > self.late_ms / 2 {
            for volume in &mut self.volumes {
                volume.moved_ms = self.now_ms;
                volume.pace.stood_still();
            }
        }
        self.ticked_ms = self.now_ms;
        for (ticket, flight) in &mut self.flights {
            if flight.since_ms + self.late_ms > self.now_ms {
                break;
            }
            let moves = self.volumes[flight.device].moved_ms + self.late_ms / MOVES_PART > self.now_ms;
            let is_read = matches!(flight.errand, Errand::Read { .. });
            if is_read && !moves && !std::mem::replace(&mut flight.late, true) {
                late.push(*ticket);
            }
        }
        for device in 0..self.volumes.len() {
            let volume = &mut self.volumes[device];
            let stands = volume.flights > 0 && volume.moved_ms + self.late_ms <= self.now_ms;
            if stands && volume.breaker.trip(self.now_ms) {
                volume.stats.faults[FaultKind::Late as usize] += 1;
                self.give_up(device);
            }
        }
        for device in 0..self.volumes.len() {
            if self.volumes[device].breaker.try_again(self.now_ms) {
                self.issue(device, Errand::Check, Work::Check);
            }
            if !self.volumes[device].breaker.is_open() {
                self.tell_distrusted(device);
            }
            self.reclaim(device);
        }
    }
}
