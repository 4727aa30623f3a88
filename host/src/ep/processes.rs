//! Ranks in several processes, a rank in each.
//!
//! A process cannot use the addresses of another. But CUDA has names for allocations (IPC handles), 64 bytes that may be sent
//! anywhere on the machine, by which another process maps them. So each rank has its buffers in one allocation, and brings all
//! others its name, with what they must agree on. After that kernels do what they do among threads; see [`crate::kernels::ep`].
//!
//! How messages come from process to process is left to the caller, who started them and has the means: MPI, a store, pipes, a
//! socket. All that is asked for is an all-gather of short byte strings: an [`Exchange`], or a closure that is one.
//!
//! Every rank takes part in every exchange even if its own part failed, and says so, so that all know, and nobody waits for it. As
//! each compares its message with all others, and messages that are not all equal differ from each in at least one, either all
//! ranks go on or none.

use super::communicator::{Buffers, GROUP, Group, PROTOCOL};
use super::{Communicator, Config, Fault, Phase};
use crate::device::{Device, Storage};
use crate::error::{Error, Result};
use crate::kernels::ep::slot;
use crate::tensor::Tensor;
use std::sync::Arc;

const OP: &str = "ep::Communicator::connect";
const MAGIC: [u8; 8] = *b"warploom";
const _: () = assert!(GROUP == 128, "a part of the protocol");

/// How processes bring each other messages.
pub trait Exchange: Send + Sync {
    /// Brings `own` to all ranks, and returns what each brought, by rank. All ranks call this, as often as each other. One that
    /// waits too long for another should give up with an error.
    ///
    /// # Errors
    /// Any; it becomes part of [`Error::Exchange`].
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>>;
}

impl<F> Exchange for F
where
    F: Fn(&[u8]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> + Send + Sync,
{
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>> {
        self(own)
    }
}

/// The ranks of other processes.
pub(super) struct Others {
    exchange: Box<dyn Exchange>,
    ranks: usize,
    /// Their buffers, mapped.
    memory: Vec<Arc<Storage>>,
}

impl Others {
    pub(super) fn memory(&self) -> &[Arc<Storage>] {
        &self.memory
    }

    fn gather(&self, op: &'static str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let failed = |what: String| Error::Exchange { op, what };
        let all = self.exchange.all_gather(own).map_err(|e| failed(e.to_string()))?;
        if all.len() == self.ranks {
            return Ok(all);
        }
        Err(failed(format!("{} messages came for {} ranks", all.len(), self.ranks)))
    }

    /// Waits for all.
    pub(super) fn meet(&self, op: &'static str) -> Result<()> {
        self.gather(op, b"here").map(drop)
    }

    /// Memory may be freed after all have forgotten it, and forgotten after nobody's kernels use it.
    pub(super) fn part(&mut self) {
        // Who cannot be reached is gone, and uses nothing any more.
        let _ = self.meet("ep::Communicator::drop");
        self.memory.clear();
        let _ = self.meet("ep::Communicator::drop");
    }
}

/// What a rank tells the others at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    protocol: u32,
    rank: u32,
    ranks: u32,
    process: u32,
    /// `hidden`, `top_k`, `experts`, `max_tokens`, and the room for rows.
    sizes: [u64; 5],
    /// The GPU.
    uuid: [u8; 16],
    /// The name of its buffers; `None` if it failed.
    handle: Option<[u8; 64]>,
}

impl Hello {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [self.protocol, self.rank, self.ranks, self.process, self.handle.is_some().into()] {
            bytes.extend(word.to_le_bytes());
        }
        self.sizes.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(self.uuid);
        bytes.extend(self.handle.unwrap_or([0; 64]));
        bytes
    }

    /// `None` if this is no message of this library's; one of another protocol says nothing but that.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(&MAGIC)?;
        let mut take = |n: usize| {
            let (part, after) = rest.split_at_checked(n)?;
            rest = after;
            Some(part)
        };
        let word = |part: &[u8]| part.try_into().ok().map(u32::from_le_bytes);
        let protocol = word(take(4)?)?;
        let nothing = Self { protocol, rank: 0, ranks: 0, process: 0, sizes: [0; 5], uuid: [0; 16], handle: None };
        if protocol != PROTOCOL {
            return Some(nothing);
        }
        let [rank, ranks, process, ready] = [word(take(4)?)?, word(take(4)?)?, word(take(4)?)?, word(take(4)?)?];
        let mut sizes = [0; 5];
        for n in &mut sizes {
            *n = u64::from_le_bytes(take(8)?.try_into().ok()?);
        }
        let uuid = take(16)?.try_into().ok()?;
        let handle: [u8; 64] = take(64)?.try_into().ok()?;
        Some(Self { rank, ranks, process, sizes, uuid, handle: (ready != 0).then_some(handle), ..nothing })
    }

    /// What all ranks said, if they agree.
    fn agree(&self, messages: &[Vec<u8>]) -> Result<Vec<Self>, Fault> {
        let rank = self.rank as usize;
        let all: Vec<Option<Self>> = messages.iter().map(|m| Self::parse(m)).collect();
        let protocol = |m: &Option<Self>| m.map_or(0, |m| m.protocol);
        if let Some(peer) = all.iter().position(|m| protocol(m) != self.protocol) {
            return Err(Fault::Version { rank, peer, own: self.protocol, theirs: protocol(&all[peer]) });
        }
        let all: Vec<Self> = all.into_iter().flatten().collect();
        let differs =
            |(peer, m): (usize, &Self)| m.rank as usize != peer || m.ranks != self.ranks || m.sizes != self.sizes;
        if let Some(peer) = all.iter().enumerate().position(differs) {
            return Err(Fault::Disagree { rank, peer, phase: Phase::Setup });
        }
        match all.iter().position(|m| m.handle.is_none()) {
            Some(peer) => Err(Fault::PeerFailed { rank, peer }),
            None => Ok(all),
        }
    }
}

impl Communicator {
    /// A rank whose peers are in other processes of this machine, one in each: `rank` of `ranks`, on this device. All processes
    /// call this, with the same sizes; `exchange` brings messages from each to all.
    ///
    /// Otherwise it is a rank like those of [`new`](Self::new), but that [`recover`](Self::recover) and dropping it exchange messages
    /// as well, and so wait for the others. What was captured from it must be gone before.
    ///
    /// Several processes may share a GPU, as far as tests go: without NVIDIA's Multi-Process Service it runs one at a time, and each
    /// wait lasts until another's turn.
    ///
    /// # Errors
    /// [`Error::Exchange`]; [`Error::Ep`] with [`Fault::Version`] if libraries do not fit together, with [`Fault::Disagree`] for other sizes,
    /// numbers of ranks, or an exchange that mixes ranks up, or with [`Fault::PeerFailed`]: on every rank, unless something else is
    /// wrong with it. [`Error::Unsupported`] on SIMT devices, whose memory is of their process alone, for GPUs that cannot reach each other's
    /// memory, or for two ranks of one process. [`Error::Value`] for sizes or a rank, as for [`new`](Self::new); [`Error::OutOfMemory`],
    /// [`Error::Driver`].
    pub fn connect(
        device: &Device,
        rank: usize,
        ranks: usize,
        config: &Config,
        exchange: impl Exchange + 'static,
    ) -> Result<Self> {
        let capacity = config.room(ranks);
        let prepare = || {
            config.check(OP, "ranks", ranks)?;
            if rank >= ranks {
                let expected = format!("less than {ranks}");
                return Err(Error::Value { op: OP, arg: "rank", expected, got: rank.to_string() });
            }
            device.preload(&["ep"])?;
            let arena = Tensor::<u8>::zeros(device, &[Buffers::arena_bytes(config, capacity)])?;
            let buffers = Buffers::in_arena(&arena, config, capacity)?;
            let handle = device.export(OP, arena.storage())?;
            Ok((arena, buffers, handle, device.uuid()?))
        };
        let own = prepare();
        let mut others = Others { exchange: Box::new(exchange), ranks, memory: vec![] };
        let size = |n: usize| n as u64;
        let hello = Hello {
            protocol: PROTOCOL,
            rank: rank as u32,
            ranks: ranks as u32,
            process: std::process::id(),
            sizes: [config.hidden, config.top_k, config.experts, config.max_tokens, capacity].map(size),
            uuid: own.as_ref().map_or([0; 16], |o| o.3),
            handle: own.as_ref().ok().map(|o| o.2),
        };
        let messages = others.gather(OP, &hello.bytes());
        let (arena, buffers, ..) = own?;
        let all = hello.agree(&messages?).map_err(Error::Ep)?;

        // Maps what the others have, and says whether that worked.
        let mapped = all.iter().enumerate().filter(|(peer, _)| *peer != rank).map(|(peer, theirs)| {
            if theirs.process == hello.process {
                let what = format!("ranks {rank} and {peer} are in one process, whose ranks Communicator::new makes");
                return Err(Error::Unsupported { op: OP, what });
            }
            Storage::import(OP, device, theirs.handle.unwrap_or([0; 64]), arena.len())
        });
        let mapped: Result<Vec<_>> = mapped.collect();
        let done = others.gather(OP, &[mapped.is_ok().into()]);
        let failed = |done: &[Vec<u8>]| done.iter().position(|d| d[..] != [1]);
        if !done.as_deref().is_ok_and(|done| failed(done).is_none()) {
            // Memory may be freed after all have forgotten it. Who cannot be reached is gone.
            let mapped = mapped.map(drop);
            let _ = others.meet(OP);
            mapped?;
            return Err(Error::Ep(Fault::PeerFailed { rank, peer: failed(&done?).unwrap_or(rank) }));
        }
        others.memory = mapped?;
        let (own, start) = (buffers.addresses(), arena.as_ptr() as u64);
        let mut table: Vec<u64> = vec![];
        let mut memory = others.memory.iter();
        for peer in 0..ranks {
            let theirs = if peer == rank { None } else { memory.next() };
            let base = theirs.map_or(start, |m| m.address() as u64);
            // What is empty lies in no arena.
            let there = |address: &u64| (start..start + arena.len() as u64).contains(address);
            table.extend(own.map(|address| if there(&address) { address - start + base } else { address }));
        }
        debug_assert_eq!(table.len(), ranks * slot::COUNT);
        let on = |uuid| all.iter().filter(|m| m.uuid == uuid).count() as u32;
        let sharing = all.iter().map(|m| on(m.uuid)).max().unwrap_or(1);
        let mut group = Group::new(config, ranks, vec![device.clone()], vec![buffers]);
        group.others = Some(others);
        Self::member(&Arc::new(group), [rank, 0], sharing, device, &table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: u32) -> Hello {
        let handle = Some([rank as u8; 64]);
        Hello { protocol: PROTOCOL, rank, ranks: 3, process: 7, sizes: [64, 2, 6, 8, 24], uuid: [3; 16], handle }
    }

    fn messages(change: impl Fn(&mut Hello)) -> Vec<Vec<u8>> {
        let mut all = [hello(0), hello(1), hello(2)];
        change(&mut all[2]);
        all.iter().map(Hello::bytes).collect()
    }

    #[test]
    fn messages_arrive_as_they_were() {
        assert_eq!(hello(0).agree(&messages(|_| ())), Ok(vec![hello(0), hello(1), hello(2)]));
        let failed = Hello { handle: None, ..hello(1) };
        assert_eq!(Hello::parse(&failed.bytes()), Some(failed));
        let whole = hello(1).bytes();
        for n in 0..whole.len() {
            assert_eq!(Hello::parse(&whole[..n]), None, "{n} bytes of a message");
        }
    }

    #[test]
    fn what_differs_is_named() {
        let seen = |change: fn(&mut Hello)| hello(0).agree(&messages(change)).unwrap_err();
        let disagree = Fault::Disagree { rank: 0, peer: 2, phase: Phase::Setup };
        assert_eq!(seen(|m| m.protocol = 77), Fault::Version { rank: 0, peer: 2, own: PROTOCOL, theirs: 77 });
        assert_eq!(seen(|m| m.sizes[0] = 72), disagree);
        assert_eq!(seen(|m| m.sizes[4] = 23), disagree);
        assert_eq!(seen(|m| m.ranks = 4), disagree);
        assert_eq!(seen(|m| m.rank = 1), disagree);
        assert_eq!(seen(|m| m.handle = None), Fault::PeerFailed { rank: 0, peer: 2 });
        // Who differs from the others sees that, too.
        let odd = Hello { sizes: [1; 5], ..hello(2) };
        let all = messages(|m| m.sizes = [1; 5]);
        assert_eq!(odd.agree(&all), Err(Fault::Disagree { rank: 2, peer: 0, phase: Phase::Setup }));
        let mut all = messages(|_| ());
        all[1] = b"another program".to_vec();
        assert_eq!(hello(0).agree(&all), Err(Fault::Version { rank: 0, peer: 1, own: PROTOCOL, theirs: 0 }));
    }
}
