package main

import (
	"context"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu"
)

const (
	// sampleEvery is how often a node is asked for its memory, and sampleWait how long for an answer is waited.
	sampleEvery = 2 * time.Second
	sampleWait  = 5 * time.Second
)

// bootMemory has the most memory that was in use in each boot of a node, in their order.
type bootMemory []struct {
	boot string
	most int64
}

// add takes a sample: what isn't available to programs is in use.
func (m *bootMemory) add(s *garboardv1.NodeStatusResponse) {
	if s.GetBootId() == "" || s.GetMemoryTotal() == 0 {
		return
	}
	used := int64(s.GetMemoryTotal()) - int64(s.GetMemoryAvailable())
	for i := range *m {
		if (*m)[i].boot == s.GetBootId() {
			(*m)[i].most = max((*m)[i].most, used)
			return
		}
	}
	*m = append(*m, struct {
		boot string
		most int64
	}{s.GetBootId(), used})
}

// figure has the most of the boot that was there at the beginning, and that has been left; budget 0: none.
func (m bootMemory) figure(what string, budget int64) figure {
	switch {
	case len(m) < 2:
		return figure{what: what, value: "not measured: the node didn't answer both before and after its restart"}
	case budget == 0:
		return figure{what: what, value: megabytes(m[0].most)}
	}
	return bytesFigure(what, m[0].most, budget)
}

// whileWatched samples the memory of the first node of a cluster while do runs. The cluster may not exist yet.
func whileWatched(ctx context.Context, cluster string, do func() error) (bootMemory, error) {
	until, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan bootMemory)
	go func() {
		var all bootMemory
		for pause(until, sampleEvery) == nil {
			sample(until, cluster, all.add)
		}
		watched <- all
	}()
	err := do()
	cancel()
	return <-watched, err
}

// sample asks the node until it doesn't answer: it may be starting, or restarting.
func sample(ctx context.Context, cluster string, add func(*garboardv1.NodeStatusResponse)) {
	c, err := qemu.Open(cluster)
	if err != nil {
		return
	}
	node, err := dial(c, c.Nodes[0])
	if err != nil {
		return
	}
	defer node.Close()
	for {
		asked, cancel := context.WithTimeout(ctx, sampleWait)
		s, err := client.Unary(asked, node.Node.Status, &garboardv1.NodeStatusRequest{})
		cancel()
		if err != nil {
			return
		}
		add(s)
		if pause(ctx, sampleEvery) != nil {
			return
		}
	}
}
