package api

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/VictoriaMetrics/metrics"
	"golang.org/x/sys/unix"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/clock"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// metricsType is that of the text format of Prometheus.
const metricsType = "text/plain; version=0.0.4; charset=utf-8"

// Metrics returns the node's metrics. The page docs/metrics.md has them all; a test
// compares it with them.
func (s *nodeService) Metrics(context.Context, *connect.Request[apiv1.MetricsRequest]) (*connect.Response[apiv1.MetricsResponse], error) {
	return connect.NewResponse(&apiv1.MetricsResponse{Text: s.metrics()}), nil
}

// serveMetrics is for Prometheus, which uses plain HTTP.
func (s *nodeService) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", metricsType)
	_, _ = w.Write(s.metrics()) // a client that is gone needs nothing
}

// metrics are read from the node at each request: nothing is kept between two.
func (s *nodeService) metrics() []byte {
	m := &measures{set: metrics.NewSet()}
	m.put("garboard_info", 1, "version", boot.Version, "kernel", kernelRelease(), "mode", s.opts.Mode.String())
	m.put("garboard_uptime_seconds", s.opts.Since().Seconds())
	for _, status := range s.opts.Graph.Statuses() {
		m.put("garboard_service_up", truth(status.Up), "service", status.ID)
		m.put("garboard_service_restarts_total", float64(status.Restarts), "service", status.ID)
	}
	s.operationMetrics(m)
	for _, c := range s.opts.Runtime.Calls() {
		m.put("garboard_controller_reconciles_total", float64(c.Calls), "controller", c.Controller)
		m.put("garboard_controller_failures_total", float64(c.Failures), "controller", c.Controller)
		m.put("garboard_controller_reconcile_seconds_total", c.Time.Seconds(), "controller", c.Controller)
	}
	for _, f := range resource.Failures.List(s.opts.Store) {
		m.put("garboard_controller_failing", 1, "controller", f.ID, "reason", string(f.Spec.Reason))
	}
	s.clusterMetrics(m)
	if t, err := clock.Statuses.Get(s.opts.Store, clock.StatusID); err == nil {
		m.put("garboard_clock_synchronized", truth(t.Spec.Synced))
		m.put("garboard_clock_offset_seconds", t.Spec.Offset.Seconds())
		m.put("garboard_clock_max_error_seconds", t.Spec.MaxError.Seconds())
	}
	s.diskMetrics(m)
	s.pressureMetrics(m)
	var text bytes.Buffer
	m.set.WritePrometheus(&text)
	return text.Bytes()
}

// measures collects the metrics of one request.
type measures struct{ set *metrics.Set }

// put adds a value with the names and values of its labels.
func (m *measures) put(name string, value float64, labels ...string) {
	var pairs []string
	for i := 0; i+1 < len(labels); i += 2 {
		pairs = append(pairs, labels[i]+"="+strconv.Quote(readable(labels[i+1])))
	}
	if len(pairs) > 0 {
		name += "{" + strings.Join(pairs, ",") + "}"
	}
	m.set.GetOrCreateGauge(name, func() float64 { return value })
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (s *nodeService) operationMetrics(m *measures) {
	all, err := s.opts.Operations.List()
	m.put("garboard_operations_readable", truth(err == nil))
	count := map[[2]string]int{}
	for _, o := range all {
		count[[2]string{o.Name, string(o.State)}]++
		if o.Question != nil {
			m.put("garboard_operation_waits_for_answer", 1, "operation", o.ID)
		}
	}
	for key, n := range count {
		m.put("garboard_operations", float64(n), "name", key[0], "state", key[1])
	}
}

// clusterMetrics are those of the node's part in its cluster.
func (s *nodeService) clusterMetrics(m *measures) {
	cfg, err := configuration.Config(s.opts.Store)
	if err == nil && cfg.Machine.Type.ControlPlane() {
		status, serves := etcd.Ready(s.opts.Store)
		m.put("garboard_etcd_member_serves", truth(serves), "member", status.MemberID)
		m.put("garboard_static_pods_unready", float64(len(controlplane.Unready(s.opts.Store))))
	}
	// What wasn't made yet is empty, and no certificate.
	machineAPI, _ := secrets.API.Get(s.opts.Store, secrets.APIID)
	kubernetes, _ := secrets.Kubernetes.Get(s.opts.Store, secrets.KubernetesID)
	member, _ := secrets.Etcd.Get(s.opts.Store, secrets.EtcdID)
	for name, text := range map[string]config.PEM{
		"machine-api":                   machineAPI.Spec.Serving.Crt,
		"machine-api-ca":                machineAPI.Spec.CA,
		"kubernetes-ca":                 kubernetes.Spec.CA.Crt,
		"kube-apiserver":                kubernetes.Spec.APIServer.Crt,
		"kube-apiserver-kubelet-client": kubernetes.Spec.KubeletClient.Crt,
		"kube-apiserver-etcd-client":    kubernetes.Spec.EtcdClient.Crt,
		"front-proxy-ca":                kubernetes.Spec.AggregatorCA,
		"front-proxy-client":            kubernetes.Spec.FrontProxy.Crt,
		"etcd-ca":                       member.Spec.CA,
		"etcd-server":                   member.Spec.Server.Crt,
		"etcd-peer":                     member.Spec.Peer.Crt,
	} {
		if cert, err := pki.ParseCert(text); err == nil {
			m.put("garboard_certificate_expiry_timestamp_seconds", float64(cert.NotAfter.Unix()), "certificate", name)
		}
	}
}

// diskMetrics are those of the file systems that fill up.
func (s *nodeService) diskMetrics(m *measures) {
	for label, path := range map[string]string{boot.LabelState: boot.StateDir, boot.LabelEphemeral: boot.EphemeralDir} {
		var st unix.Statfs_t
		if unix.Statfs(s.path(path), &st) == nil {
			m.put("garboard_filesystem_size_bytes", float64(st.Blocks)*float64(st.Bsize), "partition", label)
			m.put("garboard_filesystem_available_bytes", float64(st.Bavail)*float64(st.Bsize), "partition", label)
		}
	}
}

// pressureMetrics are how long tasks have waited for a resource
// (https://docs.kernel.org/accounting/psi.html). A kernel without them has none.
func (s *nodeService) pressureMetrics(m *measures) {
	fs, err := s.proc()
	if err != nil {
		return
	}
	const microsecond = 1e-6
	for _, of := range []string{"cpu", "memory", "io"} {
		psi, err := fs.PSIStatsForResource(of)
		if err != nil {
			continue
		}
		if psi.Some != nil {
			m.put("garboard_pressure_waiting_seconds_total", float64(psi.Some.Total)*microsecond, "resource", of)
		}
		if psi.Full != nil {
			m.put("garboard_pressure_stalled_seconds_total", float64(psi.Full.Total)*microsecond, "resource", of)
		}
	}
	if load, err := fs.LoadAvg(); err == nil {
		m.put("garboard_load1", load.Load1)
	}
	if mem, err := fs.Meminfo(); err == nil {
		m.put("garboard_memory_available_bytes", float64(number(mem.MemAvailableBytes)))
		m.put("garboard_memory_size_bytes", float64(number(mem.MemTotalBytes)))
	}
}
