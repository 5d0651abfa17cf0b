package api

import (
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// Who changes the endpoint reads, also in a dry run, what that means for all who have the former one.
func TestAnotherEndpointSaysWhatItMeans(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]bool{"cluster.controlPlane.endpoint": true, "cluster.controlPlane.localAPIServerPort": false} {
		res := applied(configuration.Result{Changes: []config.Change{{Path: path, Op: config.Changed, Old: "a", New: "b"}}}, "n1").Msg
		got := strings.Join(res.GetWarnings(), "\n")
		for _, who := range []string{"pods", "kubelets", "kubeconfigs", "other nodes"} {
			if strings.Contains(got, who) != want {
				t.Errorf("%s: %q, want %q: %v", path, got, who, want)
			}
		}
	}
}
