package api

import (
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
)

var metricName = regexp.MustCompile(`\bgarboard_[a-z0-9_]+`)

// A metric that isn't in the documentation, or that the dashboard misspells, is found here.
func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	r := newRig(t)
	ca, err := pki.NewMachineCA(time.Now())
	must(t, err)
	cfg := &config.Config{Version: config.Version}
	cfg.Machine.Type = config.Init
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, cfg))
	must(t, secrets.API.Put(r.opts.Store.As("test"), secrets.APIID, secrets.APISpec{CA: ca.Cert, Serving: config.CertKey{Crt: ca.Cert}}))
	must(t, clock.Statuses.Put(r.opts.Store.As("test"), clock.StatusID, clock.Status{Synced: true, Offset: time.Millisecond}))
	must(t, resource.Failures.Put(r.opts.Store.As("test"), "k8s.Test", resource.Failure{Reason: reason.Code("no-quorum"), Error: "x"}))
	r.serve()
	r.up("kubelet")
	res, err := ask(t, garboardv1connect.NewNodeServiceClient(r.as(reader), host).Metrics, &apiv1.MetricsRequest{})
	must(t, err)
	text := string(res.GetText())
	for _, line := range []string{
		`garboard_service_up{service="kubelet"} 1`, `garboard_controller_failing{controller="k8s.Test",reason="no-quorum"} 1`,
		`garboard_clock_synchronized 1`, `garboard_clock_offset_seconds 0.001`,
		`garboard_certificate_expiry_timestamp_seconds{certificate="machine-api-ca"} `,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("there is no %s in\n%s", line, text)
		}
	}

	// Prometheus speaks plain HTTP.
	plain, err := r.as(reader).Get(host + contract.MetricsPath)
	must(t, err)
	defer plain.Body.Close()
	body, err := io.ReadAll(plain.Body)
	must(t, err)
	if plain.StatusCode != http.StatusOK || plain.Header.Get("Content-Type") != metricsType || !strings.Contains(string(body), "garboard_info{") {
		t.Errorf("%s, %s: %s", plain.Status, plain.Header.Get("Content-Type"), body)
	}

	page, err := os.ReadFile("../../../docs/metrics.md")
	must(t, err)
	documented := names(string(page))
	// Those that this node doesn't have now: nothing waits for an answer, and the kernel of
	// the test may have no PSI.
	have := append(names(text), "garboard_operation_waits_for_answer", "garboard_operations", "garboard_controller_reconciles_total",
		"garboard_controller_failures_total", "garboard_controller_reconcile_seconds_total",
		"garboard_pressure_waiting_seconds_total", "garboard_pressure_stalled_seconds_total")
	slices.Sort(have)
	if diff := cmp.Diff(documented, slices.Compact(have)); diff != "" {
		t.Errorf("docs/metrics.md and the node (-documentation +node):\n%s", diff)
	}
	dashboard, err := os.ReadFile("../../../docs/grafana-dashboard.json")
	must(t, err)
	for _, name := range names(string(dashboard)) {
		if !slices.Contains(documented, name) {
			t.Errorf("the dashboard has %s, which no node has", name)
		}
	}
}

func names(text string) []string {
	set := map[string]bool{}
	for _, name := range metricName.FindAllString(text, -1) {
		set[name] = true
	}
	return slices.Sorted(maps.Keys(set))
}
