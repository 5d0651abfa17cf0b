package doctor

import (
	"testing"

	"github.com/garboard-os/garboard/config"
)

func TestHealthyControlPlane(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.healthy()
	_, checked := n.doctor().Diagnose(t.Context())
	for _, c := range checked {
		t.Log(c)
	}
}

func TestHealthyWorker(t *testing.T) {
	t.Parallel()
	start(t, config.Worker).healthy()
}
