//! What goes wrong between ranks.

use crate::kernels::ep::{fault, phase};
use std::fmt;

/// Where in an operation a rank was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Waiting for the others to come as far.
    Entry,
    /// Doing its part.
    Work,
    /// Waiting for the others to be done.
    Exit,
    /// Waiting for the others in [`recover`](super::Communicator::recover).
    Recovery,
    /// Getting to know the others in [`connect`](super::Communicator::connect).
    Setup,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Entry => "entry",
            Phase::Work => "work",
            Phase::Exit => "exit",
            Phase::Recovery => "recovery",
            Phase::Setup => "setup",
        })
    }
}

/// Why an operation of several ranks failed, as `rank` saw it. All of its later operations do nothing until all ranks
/// [`recover`](super::Communicator::recover).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A peer did not come in time: it never called, is stuck, or failed before. One at another operation is [`Disagree`](Self::Disagree) if anything of that has come.
    #[error("rank {rank} waited too long for rank {peer} ({phase})")]
    TimeOut {
        /// Who waited.
        rank: usize,
        /// For whom.
        peer: usize,
        /// Where.
        phase: Phase,
    },
    /// A peer is at another operation, or at one with other shapes or options. Some of that is seen only when the time is over.
    #[error("rank {rank} and rank {peer} do not call the same operation with the same shapes ({phase})")]
    Disagree {
        /// Who noticed.
        rank: usize,
        /// Who differs.
        peer: usize,
        /// Where.
        phase: Phase,
    },
    /// A peer is of a library with another protocol between ranks.
    #[error("rank {rank} talks by protocol {own}, rank {peer} by {theirs}")]
    Version {
        /// Who noticed.
        rank: usize,
        /// Who differs.
        peer: usize,
        /// The protocol of `rank`.
        own: u32,
        /// That of the peer; 0 if it is none of this library.
        theirs: u32,
    },
    /// A peer's part of the operation failed; it knows why.
    #[error("rank {rank} was told by rank {peer} that its part failed")]
    PeerFailed {
        /// Who was told.
        rank: usize,
        /// By whom.
        peer: usize,
    },
    /// An operation could not be launched before, so that this rank is behind the others, who wait for it in vain.
    #[error("rank {rank} could not launch an operation before, and is behind the others")]
    Behind {
        /// Who.
        rank: usize,
    },
    /// A token has an expert that does not exist.
    #[error("rank {rank}: token {token} has an expert out of range")]
    BadId {
        /// Whose token.
        rank: usize,
        /// Which.
        token: usize,
    },
    /// More tokens go to a rank than it has room for. All ranks see this.
    #[error("rank {rank}: {tokens} tokens go to rank {peer}, which has room for {capacity}")]
    Overflow {
        /// Who noticed.
        rank: usize,
        /// Where they go.
        peer: usize,
        /// How many.
        tokens: usize,
        /// Room.
        capacity: usize,
    },
}

impl Fault {
    /// From the words that kernels wrote.
    pub(super) fn decode(rank: usize, words: &[u32], capacity: usize) -> Option<Self> {
        let &[code, peer, at, value] = words else { return None };
        let phase = match at {
            phase::ENTRY => Phase::Entry,
            phase::EXIT => Phase::Exit,
            _ => Phase::Work,
        };
        let (peer, value) = (peer as usize, value as usize);
        Some(match code & ((1 << fault::CODE_BITS) - 1) {
            fault::TIME_OUT => Fault::TimeOut { rank, peer, phase },
            fault::DISAGREE => Fault::Disagree { rank, peer, phase },
            fault::PEER_FAILED => Fault::PeerFailed { rank, peer },
            fault::BAD_ID => Fault::BadId { rank, token: value },
            fault::OVERFLOW => Fault::Overflow { rank, peer, tokens: value, capacity },
            _ => return None,
        })
    }
}
