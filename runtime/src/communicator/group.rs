//! A group of ranks and its operations.

use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use bytemuck::Pod;
use ir::mesh::Rank;

use super::chunk::{Operation, part};
use super::element::{Element, Reduction};
use super::error::{Cause, Error, Loss};
use super::lane::{Connect, Lane, Open};
use super::movement::{all_gather, all_to_all, broadcast, recv, send};
use super::reduction::reduce_over;
use super::wire::{Identity, Wire};

/// Ranks that communicate. Operations of one group run in the order in which they are called or started, which
/// must be the same on all its ranks; those of different groups do not wait for one another.
///
/// All operations fail with what ended the run: a rank that was lost, did not come before the timeout or called
/// another operation, or an abort.
#[derive(Clone)]
pub struct Group {
    lane: Arc<Open>,
}

/// An operation under way, started with a buffer that it gives back.
#[must_use]
pub struct Pending<T> {
    result: Receiver<Result<T, Error>>,
    identity: Identity,
}

impl Group {
    /// A group whose links are connected with its first operation.
    pub(super) fn new(me: usize, identity: Identity, connect: Connect) -> Group {
        Group { lane: Arc::new(Open(Arc::new(Lane::new(me, identity, connect)))) }
    }

    /// Number of its ranks.
    pub fn size(&self) -> usize {
        self.lane.0.identity.members.len()
    }

    /// This rank's place among them.
    pub fn position(&self) -> usize {
        self.lane.0.me
    }

    /// Its ranks, in order.
    pub fn members(&self) -> Vec<Rank> {
        self.lane.0.identity.members.iter().map(|rank| Rank(*rank)).collect()
    }

    /// Elements of a message of `length` that are this rank's part: `ceil(length / size)`, the last parts shorter
    /// or empty.
    pub fn part(&self, length: usize) -> Range<usize> {
        part(length, self.lane.0.me, self.size())
    }

    /// Payload bytes that left this rank for another in this group's operations of one kind.
    pub fn bytes_sent(&self, operation: Operation) -> u64 {
        self.lane.0.sent(operation)
    }

    /// Reduces `data` over all ranks; all get the same bits.
    ///
    /// # Errors
    /// What ended the run.
    pub fn all_reduce<T: Element>(&self, reduction: Reduction, data: &mut [T]) -> Result<(), Error> {
        self.now(Operation::AllReduce, |wire| reduce_over(wire, Operation::AllReduce, reduction, data))
    }

    /// Reduces this rank's part of `data` over all ranks, in place; the other parts are left as they were.
    ///
    /// # Errors
    /// What ended the run.
    pub fn reduce_scatter<T: Element>(&self, reduction: Reduction, data: &mut [T]) -> Result<(), Error> {
        self.now(Operation::ReduceScatter, |wire| reduce_over(wire, Operation::ReduceScatter, reduction, data))
    }

    /// Fills `data` with the parts of all ranks; this rank's part holds what it gives.
    ///
    /// # Errors
    /// What ended the run.
    pub fn all_gather<T: Pod>(&self, data: &mut [T]) -> Result<(), Error> {
        self.now(Operation::AllGather, |wire| all_gather(wire, Operation::AllGather, data))
    }

    /// Gives rank i of the group the i-th of equal parts of `data`; the result holds such parts from all ranks.
    ///
    /// # Errors
    /// What ended the run.
    ///
    /// # Panics
    /// If the length is no multiple of the number of ranks.
    pub fn all_to_all<T: Pod>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        assert!(data.len().is_multiple_of(self.size()), "the parts of an all_to_all are equal");
        let mut result = data.to_vec();
        self.now(Operation::AllToAll, |wire| all_to_all(wire, data, &mut result))?;
        Ok(result)
    }

    /// Fills `data` with that of the group's rank `root`.
    ///
    /// # Errors
    /// What ended the run.
    pub fn broadcast<T: Pod>(&self, root: usize, data: &mut [T]) -> Result<(), Error> {
        self.now(Operation::Broadcast, |wire| broadcast(wire, root, data))
    }

    /// Waits until all ranks have come.
    ///
    /// # Errors
    /// What ended the run.
    pub fn barrier(&self) -> Result<(), Error> {
        self.now(Operation::Barrier, |wire| all_gather::<u8>(wire, Operation::Barrier, &mut []))
    }

    /// Starts an all_reduce and gives the buffer back when it is done.
    pub fn start_all_reduce<T: Element, D>(&self, reduction: Reduction, mut data: D) -> Pending<D>
    where
        D: DerefMut<Target = [T]> + Send + 'static,
    {
        self.start(Operation::AllReduce, move |wire| {
            let sent = reduce_over(wire, Operation::AllReduce, reduction, &mut data)?;
            Ok((data, sent))
        })
    }

    /// Starts a reduce_scatter and gives the buffer back when it is done.
    pub fn start_reduce_scatter<T: Element, D>(&self, reduction: Reduction, mut data: D) -> Pending<D>
    where
        D: DerefMut<Target = [T]> + Send + 'static,
    {
        self.start(Operation::ReduceScatter, move |wire| {
            let sent = reduce_over(wire, Operation::ReduceScatter, reduction, &mut data)?;
            Ok((data, sent))
        })
    }

    /// Starts an all_gather and gives the buffer back when it is done.
    pub fn start_all_gather<T: Pod + Send, D>(&self, mut data: D) -> Pending<D>
    where
        D: DerefMut<Target = [T]> + Send + 'static,
    {
        self.start(Operation::AllGather, move |wire| {
            let sent = all_gather(wire, Operation::AllGather, &mut data)?;
            Ok((data, sent))
        })
    }

    /// Starts an all_to_all and gives the result when it is done.
    ///
    /// # Panics
    /// If the length is no multiple of the number of ranks.
    pub fn start_all_to_all<T: Pod + Send>(&self, data: Vec<T>) -> Pending<Vec<T>> {
        assert!(data.len().is_multiple_of(self.size()), "the parts of an all_to_all are equal");
        self.start(Operation::AllToAll, move |wire| {
            let mut result = data.clone();
            let sent = all_to_all(wire, &data, &mut result)?;
            Ok((result, sent))
        })
    }

    /// Starts a broadcast and gives the buffer back when it is done.
    pub fn start_broadcast<T: Pod + Send>(&self, root: usize, mut data: Vec<T>) -> Pending<Vec<T>> {
        self.start(Operation::Broadcast, move |wire| {
            let sent = broadcast(wire, root, &mut data)?;
            Ok((data, sent))
        })
    }

    /// Starts sending `data` to the group's rank `to`. Nobody need wait for it: an error ends the run.
    pub fn start_send<T: Pod + Send>(&self, to: usize, data: Vec<T>) -> Pending<Vec<T>> {
        let lane = &self.lane.0;
        // What the queue has room for needs no other thread.
        let sent = lane.at_once(|wire| wire.has_room(to, size_of_val(&*data)).then(|| send(wire, to, &data)));
        if let Some(sent) = sent {
            let (sender, result) = sync_channel(1);
            let sent = sent.map(|bytes| lane.count(Operation::Send, bytes));
            sender.send(sent.map(|()| data)).expect("the receiver is below");
            return Pending { result, identity: lane.identity.clone() };
        }
        self.start(Operation::Send, move |wire| {
            let sent = send(wire, to, &data)?;
            Ok((data, sent))
        })
    }

    /// Receives what the group's rank `from` sends.
    ///
    /// # Errors
    /// What ended the run.
    pub fn recv<T: Pod>(&self, from: usize, data: &mut [T]) -> Result<(), Error> {
        self.now(Operation::Send, |wire| recv(wire, from, data))
    }

    /// Starts receiving `length` elements from the group's rank `from`.
    pub fn start_recv<T: Pod + Send>(&self, from: usize, length: usize) -> Pending<Vec<T>> {
        self.start(Operation::Send, move |wire| {
            let mut data = vec![T::zeroed(); length];
            let sent = recv(wire, from, &mut data)?;
            Ok((data, sent))
        })
    }

    /// How the group is called, and the run it belongs to.
    #[cfg(feature = "nccl")]
    pub(super) fn identity(&self) -> &Identity {
        &self.lane.0.identity
    }

    /// Runs an operation on this thread, after those that were started before.
    fn now(&self, operation: Operation, run: impl FnOnce(&mut Wire) -> Result<u64, Error>) -> Result<(), Error> {
        let lane = &self.lane.0;
        let sent = lane.now(|wire| run(wire?))?;
        lane.count(operation, sent);
        Ok(())
    }

    /// Hands an operation to this group's thread.
    fn start<T: Send + 'static>(
        &self,
        operation: Operation,
        run: impl FnOnce(&mut Wire) -> Result<(T, u64), Error> + Send + 'static,
    ) -> Pending<T> {
        let (sender, result) = sync_channel(1);
        let lane = self.lane.0.clone();
        let job = move |wire: Result<&mut Wire, Error>| {
            let result = wire.and_then(run).map(|(data, sent)| {
                lane.count(operation, sent);
                data
            });
            // Nobody waits for most sends.
            sender.send(result).ok();
        };
        Lane::push(&self.lane.0, Box::new(job));
        Pending { result, identity: self.lane.0.identity.clone() }
    }
}

impl<T> Pending<T> {
    /// Waits for the operation's end and gives its result.
    ///
    /// # Errors
    /// What ended the run.
    pub fn wait(self) -> Result<T, Error> {
        self.result.recv().unwrap_or_else(|_| {
            let Identity { name, watch, .. } = &self.identity;
            let cause = Cause::Aborted(format!("the thread of {name} ended"));
            Err(watch.abort(Loss { rank: watch.rank, cause, report: watch.entry.report() }))
        })
    }
}
