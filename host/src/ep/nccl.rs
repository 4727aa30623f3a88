//! The same operations over NCCL: for ranks that do not reach each other's memory.
//!
//! NCCL moves whole pieces of memory from rank to rank, and has to know their sizes on the host. So each rank has, for every
//! other, buffers of its own that stand in for that rank's, and the kernels run alone, on those: dispatch sorts rows into the
//! stand-ins, at the places where they shall lie, NCCL sends them to the same places of the real ones; combine gets rows into the
//! stand-ins and adds them up there. Counts are exchanged first, and read by the host. Results are those of the other path bit for
//! bit, as every row has the same place and is added in the same order.
//!
//! `libnccl.so.2` is looked up at run time; only the functions of `api!` are used, which all of NCCL 2.7 and later have. Before a
//! rank calls NCCL, all ranks of the process meet on the host, within the time-out, and agree on what they do: NCCL would wait for
//! ever.

use super::communicator::{Buffers, Group};
use super::fault::Phase;
use super::{Communicator, Fault};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::kernels::ep::{MAX_RANKS, slot};
use crate::tensor::Tensor;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

const LIBRARIES: &[&str] = &["libnccl.so.2", "libnccl.so"];
/// `ncclUint8`.
const BYTES: c_int = 1;

type RawComm = *mut c_void;

macro_rules! api {
    ($($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)*) => {
        struct Api {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
            get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            _library: Library,
        }

        impl Api {
            /// The name of the missing function if one is.
            ///
            /// # Safety
            /// The library's functions have these signatures.
            unsafe fn load(library: Library) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: promised by the caller; the library is never closed.
                    $($name: *unsafe { library.get($symbol.as_bytes()) }.map_err(|_| $symbol)?,)*
                    // SAFETY: as above.
                    get_error_string: *unsafe { library.get(b"ncclGetErrorString") }.map_err(|_| "ncclGetErrorString")?,
                    _library: library,
                })
            }

            $(
                #[doc = concat!("`", $symbol, "`.\n\n# Safety\nAs NCCL's manual demands.")]
                unsafe fn $name(&self, $($arg: $ty),*) -> Result<()> {
                    // SAFETY: forwarded to the caller.
                    match unsafe { (self.$name)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.error($symbol, code)),
                    }
                }
            )*
        }
    };
}

api! {
    get_version = "ncclGetVersion"(version: *mut c_int);
    comm_init_all = "ncclCommInitAll"(comms: *mut RawComm, count: c_int, devices: *const c_int);
    comm_destroy = "ncclCommDestroy"(comm: RawComm);
    group_start = "ncclGroupStart"();
    group_end = "ncclGroupEnd"();
    send = "ncclSend"(from: *const c_void, count: usize, kind: c_int, peer: c_int, comm: RawComm, stream: *mut c_void);
    receive = "ncclRecv"(to: *mut c_void, count: usize, kind: c_int, peer: c_int, comm: RawComm, stream: *mut c_void);
}

impl Api {
    #[cold]
    fn error(&self, call: &'static str, code: c_int) -> Error {
        // SAFETY: takes any code and returns a constant string.
        let name = unsafe { CStr::from_ptr((self.get_error_string)(code)) }.to_string_lossy().into_owned();
        Error::Driver { call, code, name, kernel: None, log: String::new() }
    }
}

/// NCCL, loaded at the first call.
fn api() -> Result<&'static Api> {
    static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let load = || {
        let mut failures = vec![];
        let library = LIBRARIES
            .iter()
            // SAFETY: NCCL's library may be loaded at any time by any thread.
            .find_map(|name| unsafe { Library::new(name) }.map_err(|e| failures.push(e.to_string())).ok())
            .ok_or_else(|| failures.swap_remove(0))?;
        // SAFETY: the signatures are those of NCCL's manual.
        unsafe { Api::load(library) }.map_err(|name| format!("{} lacks {name}", LIBRARIES[0]))
    };
    API.get_or_init(load)
        .as_ref()
        .map_err(|e| Error::Unsupported { op: "ep::Communicator::with_nccl", what: format!("no NCCL: {e}") })
}

/// The version of NCCL, such as 22703 for 2.27.3.
///
/// # Errors
/// [`Error::Unsupported`] if there is none.
pub fn version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the address is that of an integer.
    unsafe { api()?.get_version(&raw mut version)? };
    Ok(version)
}

/// A communicator of NCCL's, of one rank.
struct Comm(RawComm);
// SAFETY: a handle, which any one thread at a time may use.
unsafe impl Send for Comm {}
// SAFETY: only used through `&mut Communicator`.
unsafe impl Sync for Comm {}

impl Drop for Comm {
    fn drop(&mut self) {
        if let Ok(api) = api() {
            // SAFETY: made by `with_nccl`; the stream's work was waited for, or is, by NCCL.
            let _ = unsafe { api.comm_destroy(self.0) };
        }
    }
}

/// What a rank needs besides.
pub(super) struct Nccl {
    comm: Comm,
    /// For each rank a stand-in, but for this one.
    stand_ins: Vec<Option<Buffers>>,
    /// `[ranks, slot::COUNT]`: the addresses of the stand-ins, and of this rank's own buffers.
    table: Tensor<u64>,
}

/// Where the rows that one rank sends another lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: usize,
    rows: usize,
}

/// Tokens from each rank to each; `None` in slots.
pub(super) type Counts = Option<[[u32; MAX_RANKS]; MAX_RANKS]>;

impl Communicator {
    /// As [`new`](Self::new), but ranks exchange their rows over NCCL, each on a GPU of its own. Operations wait on the host, for
    /// the other ranks and for sizes, and cannot be captured; results are the same bit for bit. Stand-ins take as much memory
    /// as the ranks' buffers, once for each other rank.
    ///
    /// A fault that a rank's kernels find ([`BadId`](super::Fault::BadId), or too little room in slots) is that rank's alone here: its peers are not told, and may get rows of an earlier operation
    /// from it until it recovers.
    ///
    /// NCCL's environment variables apply; `NCCL_NVLS_ENABLE=0` keeps it from NVLink multicast, which this never needs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL, for SIMT devices, or a GPU that is there twice; [`Error::Driver`] with NCCL's error;
    /// and as for [`new`](Self::new).
    pub fn with_nccl(devices: &[crate::Device], config: &super::Config) -> Result<Vec<Self>> {
        const OP: &str = "ep::Communicator::with_nccl";
        let unsupported = |what: &str| Error::Unsupported { op: OP, what: what.into() };
        let ordinals = devices.iter().map(|d| d.cuda_ordinal().map(|o| o as c_int)).collect::<Option<Vec<_>>>();
        let ordinals = ordinals.ok_or_else(|| unsupported("NCCL is for GPUs, not for SIMT devices"))?;
        if ordinals.iter().enumerate().any(|(i, o)| ordinals[..i].contains(o)) {
            return Err(unsupported("NCCL wants a GPU for each rank"));
        }
        let api = api()?;
        let mut ranks = Self::build(devices, config, false)?;
        let mut comms = vec![std::ptr::null_mut(); ranks.len()];
        // SAFETY: as many handles and ordinals as are said.
        unsafe { api.comm_init_all(comms.as_mut_ptr(), comms.len() as c_int, ordinals.as_ptr())? };
        let comms: Vec<Comm> = comms.into_iter().map(Comm).collect();
        for (rank, comm) in ranks.iter_mut().zip(comms) {
            let (count, capacity) = (rank.ranks(), rank.capacity());
            let mut stand_ins = vec![];
            for r in 0..count {
                let buffers = || Buffers::new(rank.device(), config, capacity);
                stand_ins.push(if r == rank.rank() { None } else { Some(buffers()?) });
            }
            let own = rank.own(|b| b.addresses());
            let row = |b: &Option<Buffers>| b.as_ref().map_or(own, Buffers::addresses);
            let table: Vec<u64> = stand_ins.iter().flat_map(row).collect();
            let table = Tensor::from_slice(rank.device(), &table, &[count, slot::COUNT])?;
            rank.nccl = Some(Arc::new(Nccl { comm, stand_ins, table }));
        }
        Ok(ranks)
    }
}

impl Nccl {
    pub(super) fn table(&self) -> &Tensor<u64> {
        &self.table
    }
}

/// All ranks are at the same operation.
fn agree(group: &Group, rank: usize, signature: u32) -> Result<()> {
    let missing = |peer| Error::Ep(Fault::TimeOut { rank, peer, phase: Phase::Entry });
    let others = group.exchange(rank, signature).map_err(missing)?;
    match others.iter().position(|&s| s != signature) {
        None => Ok(()),
        Some(peer) => Err(Error::Ep(Fault::Disagree { rank, peer, phase: Phase::Entry })),
    }
}

impl Communicator {
    /// Before anything of an operation: it can be done, and all ranks do it.
    pub(super) fn nccl_begin(&self, op: &'static str, stream: &Stream, signature: u32) -> Result<()> {
        if stream.is_capturing() {
            return Err(Error::Unsupported {
                op,
                what: "over NCCL operations read sizes, and cannot be captured".into(),
            });
        }
        agree(&self.group, self.rank(), signature)
    }

    fn nccl(&self) -> &Nccl {
        self.nccl.as_deref().expect("called for ranks over NCCL only")
    }

    /// Sends to and receives from every other rank: `piece` gives for a rank the addresses and bytes of what is sent and of what
    /// is received.
    ///
    /// # Safety
    /// The addresses are memory of this rank's device, until the stream has done this.
    unsafe fn nccl_exchange(
        &self,
        stream: &Stream,
        pieces: impl Fn(usize) -> Vec<(*const u8, usize, *mut u8, usize)>,
    ) -> Result<()> {
        let (api, nccl) = (api()?, self.nccl());
        // SAFETY: pieces are what the caller promised.
        unsafe { api.group_start()? };
        let mut outcome = Ok(());
        for peer in (0..self.ranks()).filter(|&p| p != self.rank()) {
            for (from, sent, to, received) in pieces(peer) {
                let (comm, raw) = (nccl.comm.0, stream.as_raw());
                // SAFETY: as above.
                unsafe {
                    if sent > 0 {
                        outcome = outcome.and_then(|()| api.send(from.cast(), sent, BYTES, peer as c_int, comm, raw));
                    }
                    if received > 0 {
                        let receive = || api.receive(to.cast(), received, BYTES, peer as c_int, comm, raw);
                        outcome = outcome.and_then(|()| receive());
                    }
                }
            }
        }
        // SAFETY: begun above.
        let ended = unsafe { api.group_end() };
        outcome.and(ended)
    }

    /// Exchanges the ranks' counts: the matrix, on the host and in this rank's buffer.
    pub(super) fn nccl_counts(&self, stream: &Stream, totals: &Tensor<u32>) -> Result<Counts> {
        let own = totals.to_vec()?;
        let row: [u64; MAX_RANKS] = std::array::from_fn(|d| own[d].into());
        let counts = self.own(|b| b.counts.clone());
        let base = counts.as_ptr().cast_mut().cast::<u8>();
        let at = |r: usize| base.wrapping_add(r * MAX_RANKS * 8);
        let mut mine = counts.narrow(0, self.rank(), 1)?;
        mine.copy_from_slice(&row)?;
        let bytes = MAX_RANKS * 8;
        // SAFETY: rows of the rank's own matrix.
        unsafe { self.nccl_exchange(stream, |p| vec![(at(self.rank()).cast_const(), bytes, at(p), bytes)])? };
        stream.synchronize()?;
        let all = counts.narrow(0, 0, MAX_RANKS)?.to_vec()?;
        Ok(Some(std::array::from_fn(|s| std::array::from_fn(|d| all[s * MAX_RANKS + d] as u32))))
    }

    /// Whether no rank would get more than it has room for.
    pub(super) fn nccl_fits(&self, counts: &Counts) -> bool {
        let Some(counts) = counts else { return true };
        (0..self.ranks()).all(|d| counts.iter().map(|row| row[d] as usize).sum::<usize>() <= self.capacity())
    }

    fn range(&self, counts: &Counts, from: usize, to: usize) -> Range {
        match counts {
            None => Range { first: from * self.config().max_tokens, rows: self.config().max_tokens },
            Some(counts) => Range {
                first: counts[..from].iter().map(|row| row[to] as usize).sum(),
                rows: counts[from][to] as usize,
            },
        }
    }

    /// Sends what dispatch put in the stand-ins to where it belongs.
    pub(super) fn nccl_send_rows(&self, stream: &Stream, counts: &Counts, quantise: bool) -> Result<()> {
        let config = self.config();
        let (hidden, k) = (config.hidden, config.top_k * 4);
        let row = if quantise { hidden } else { hidden * 2 };
        let scales = if quantise { hidden / super::communicator::GROUP * 4 } else { 0 };
        let own = self.own(|b| b.addresses());
        let pieces = |peer: usize| {
            let there = self.nccl().stand_ins[peer].as_ref().expect("one for each peer").addresses();
            let (out, back) = (self.range(counts, self.rank(), peer), self.range(counts, peer, self.rank()));
            let piece = |(s, bytes): (usize, usize)| {
                (
                    (there[s] as *const u8).wrapping_add(out.first * bytes),
                    out.rows * bytes,
                    (own[s] as *mut u8).wrapping_add(back.first * bytes),
                    back.rows * bytes,
                )
            };
            [(slot::ROWS, row), (slot::SCALES, scales), (slot::IDS, k), (slot::WEIGHTS, k)].map(piece).to_vec()
        };
        // SAFETY: ranges of counts that fit, in buffers of the group.
        unsafe { self.nccl_exchange(stream, pieces) }
    }

    /// Gets results from where the rows went to the stand-ins.
    pub(super) fn nccl_get_results(&self, stream: &Stream, counts: &Counts) -> Result<()> {
        let bytes = self.config().hidden * 2;
        let own = self.own(|b| b.addresses());
        let pieces = |peer: usize| {
            let there = self.nccl().stand_ins[peer].as_ref().expect("one for each peer").addresses();
            let (out, back) = (self.range(counts, peer, self.rank()), self.range(counts, self.rank(), peer));
            vec![(
                (own[slot::RESULTS] as *const u8).wrapping_add(out.first * bytes),
                out.rows * bytes,
                (there[slot::RESULTS] as *mut u8).wrapping_add(back.first * bytes),
                back.rows * bytes,
            )]
        };
        // SAFETY: as above.
        unsafe { self.nccl_exchange(stream, pieces) }
    }

    /// Sends pieces of `x` to the ranks' rows.
    pub(super) fn nccl_all_to_all(&self, stream: &Stream, x: *const u8, bytes: usize) -> Result<()> {
        let own = self.own(|b| b.addresses())[slot::ROWS] as *mut u8;
        let pieces = |peer: usize| vec![(x.wrapping_add(peer * bytes), bytes, own.wrapping_add(peer * bytes), bytes)];
        // SAFETY: as many pieces as ranks, which the caller checked; the own one is copied.
        unsafe {
            stream.copy_raw(own.wrapping_add(self.rank() * bytes), x.wrapping_add(self.rank() * bytes), bytes)?;
            self.nccl_exchange(stream, pieces)
        }
    }
}
