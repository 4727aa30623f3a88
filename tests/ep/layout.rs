use super::ranks::{Dice, on_every_setup, run};
use warploom::ep::{Config, Fault, LayoutOutput};
use warploom::{Error, Tensor, reference};

#[test]
fn matches_the_reference() {
    on_every_setup(&[1, 2, 5, 8], |devices| {
        let (ranks, per_rank) = (devices.len(), 3);
        for (tokens, top_k) in [(0, 1), (1, 2), (700, 3), (5000, 1)] {
            let config = Config::new(8, top_k, ranks * per_rank, 5000).capacity(1);
            run(devices, &config, |rank, stream, meeting| {
                let d = rank.device().clone();
                let ids = Dice(tokens as u64 + rank.rank() as u64 + 1).experts(tokens, top_k, ranks * per_rank);
                let want = reference::ep::layout(&ids, top_k, per_rank, ranks);
                let ids = Tensor::from_slice(&d, &ids, &[tokens, top_k]).unwrap();
                let mut places = Tensor::uninit(&d, &[tokens, ranks]).unwrap();
                let mut in_rank = Tensor::uninit(&d, &[tokens, ranks]).unwrap();
                let mut per_expert = Tensor::uninit(&d, &[ranks * per_rank]).unwrap();
                let mut counts = Tensor::uninit(&d, &[ranks]).unwrap();
                let out = LayoutOutput::default();
                let mut out = out.per_rank(&mut counts).per_expert(&mut per_expert).in_rank(&mut in_rank);
                rank.layout(stream, &mut places, &mut out, &ids).unwrap();
                rank.check(stream).unwrap();
                meeting.wait();
                assert_eq!(places.to_vec().unwrap(), want.places);
                assert_eq!(counts.to_vec().unwrap(), want.per_rank);
                assert_eq!(per_expert.to_vec().unwrap(), want.per_expert);
                assert_eq!(in_rank.to_vec().unwrap(), want.in_rank);
            });
        }
    });
}

#[test]
fn bad_input() {
    on_every_setup(&[2], |devices| {
        run(devices, &Config::new(8, 2, 4, 8), |rank, stream, _| {
            let d = rank.device().clone();
            let ids = Tensor::from_slice(&d, &[0, 1, 2, 3, 1, 4], &[3, 2]).unwrap();
            let mut places = Tensor::uninit(&d, &[3, 3]).unwrap();
            let e = rank.layout(stream, &mut places, &mut LayoutOutput::default(), &ids);
            assert!(matches!(e, Err(Error::Shape { arg: "places", .. })), "{e:?}");
            let mut places = Tensor::uninit(&d, &[3, 2]).unwrap();
            rank.layout(stream, &mut places, &mut LayoutOutput::default(), &ids).unwrap();
            let e = rank.check(stream);
            assert!(matches!(e, Err(Error::Ep(Fault::BadId { token: 2, .. }))), "{e:?}");
        });
    });
}
