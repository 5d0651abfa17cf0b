package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// quiet is for servers whose clients refuse them on purpose.
var quiet = log.New(io.Discard, "", 0)

// server answers every request with what it is set to.
type server struct {
	url string

	mu   sync.Mutex // guards the following
	code int
	body string
}

func (s *server) set(code int, body string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.code, s.body = code, body
}

func (s *server) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.code == 0 { // nobody serves
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(s.code)
	fmt.Fprint(w, s.body)
}

// newServer speaks TLS with a certificate that nobody knows, as the control plane's
// programs do.
func newServer(t *testing.T, path string) *server {
	t.Helper()
	s := &server{code: http.StatusOK, body: "ok"}
	ts := httptest.NewTLSServer(s)
	t.Cleanup(ts.Close)
	s.url = ts.URL + path
	return s
}

func issue(t *testing.T, ca pki.CA, leaf pki.Leaf) tls.Certificate {
	t.Helper()
	leaf.Server = true
	if leaf.Now.IsZero() {
		leaf.Now = time.Now()
	}
	crt, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// serveTLS serves on a listener, or one of its own, and returns the URL.
func serveTLS(t *testing.T, listener net.Listener, handler http.Handler, cert tls.Certificate) string {
	t.Helper()
	ts := httptest.NewUnstartedServer(handler)
	if listener != nil {
		ts.Listener.Close()
		ts.Listener = listener
	}
	ts.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequestClientCert, NextProtos: []string{"h2", "http/1.1"}}
	ts.Config.ErrorLog = quiet
	ts.EnableHTTP2 = true
	ts.StartTLS()
	t.Cleanup(ts.Close)
	return "https://" + ts.Listener.Addr().String()
}

// etcdServer is etcd's health endpoint, and the part of its gRPC API that is asked.
type etcdServer struct {
	pb.UnimplementedClusterServer
	pb.UnimplementedMaintenanceServer
	health, client string
	ready          *server

	mu      sync.Mutex // guards the following
	members []*pb.Member
	alarms  []pb.AlarmType
}

func newEtcd(t *testing.T, ca config.CertKey) *etcdServer {
	t.Helper()
	e := &etcdServer{ready: &server{code: http.StatusOK, body: "ok\n"}, members: []*pb.Member{{ID: 1, Name: nodeName, PeerURLs: []string{"https://10.5.0.2:2380"}}}}
	plain := httptest.NewServer(e.ready)
	t.Cleanup(plain.Close)
	e.health = plain.URL
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(ca.Crt)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{issue(t, ca.CA(), pki.Leaf{CN: nodeName, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: clients,
	})))
	pb.RegisterClusterServer(server, e)
	pb.RegisterMaintenanceServer(server, e)
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-served })
	e.client = "https://" + listener.Addr().String()
	return e
}

func (e *etcdServer) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &pb.MemberListResponse{Header: &pb.ResponseHeader{}, Members: e.members}, nil
}

func (e *etcdServer) Alarm(context.Context, *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	found := &pb.AlarmResponse{Header: &pb.ResponseHeader{}}
	for _, a := range e.alarms {
		found.Alarms = append(found.Alarms, &pb.AlarmMember{MemberID: 1, Alarm: a})
	}
	return found, nil
}

// kubernetesAPI has every object that it is asked for, but the kinds that it really
// keeps, and those that are to be missing.
type kubernetesAPI struct {
	t *testing.T

	mu      sync.Mutex // guards the following
	objects map[string]kubeclient.Object
	missing map[string]bool                      // by the last part of the path
	fails   map[string]func(http.ResponseWriter) // by path
}

// kinds are all that the manifests are made of, and what the doctor looks at.
var kinds = map[string][]struct{ kind, resource, scope string }{
	"v1": {{"Node", "nodes", "Cluster"}, {"Pod", "pods", "Namespaced"}, {"Secret", "secrets", "Namespaced"}, {"ConfigMap", "configmaps", "Namespaced"},
		{"Service", "services", "Namespaced"}, {"ServiceAccount", "serviceaccounts", "Namespaced"}, {"Namespace", "namespaces", "Cluster"}},
	"apps/v1": {{"DaemonSet", "daemonsets", "Namespaced"}, {"Deployment", "deployments", "Namespaced"}},
	"rbac.authorization.k8s.io/v1": {{"ClusterRole", "clusterroles", "Cluster"}, {"ClusterRoleBinding", "clusterrolebindings", "Cluster"},
		{"Role", "roles", "Namespaced"}, {"RoleBinding", "rolebindings", "Namespaced"}},
	"admissionregistration.k8s.io/v1": {{"ValidatingAdmissionPolicy", "validatingadmissionpolicies", "Cluster"},
		{"ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", "Cluster"},
		{"ValidatingWebhookConfiguration", "validatingwebhookconfigurations", "Cluster"}, {"MutatingWebhookConfiguration", "mutatingwebhookconfigurations", "Cluster"}},
	"discovery.k8s.io/v1":       {{"EndpointSlice", "endpointslices", "Namespaced"}},
	"apiregistration.k8s.io/v1": {{"APIService", "apiservices", "Cluster"}},
	csrVersion:                  {{csrKind, "certificatesigningrequests", "Cluster"}},
}

// listed are the kinds whose objects are really kept, by their resources.
var listed = map[string]string{
	"nodes": "Node", "pods": "Pod", "certificatesigningrequests": csrKind, "endpointslices": "EndpointSlice", "apiservices": "APIService",
	"validatingwebhookconfigurations": "ValidatingWebhookConfiguration", "mutatingwebhookconfigurations": "MutatingWebhookConfiguration",
}

func (k *kubernetesAPI) discovery(core bool) map[string]any {
	var items []any
	for gv, list := range kinds {
		group, version, grouped := strings.Cut(gv, "/")
		if !grouped {
			group, version = "", gv
		}
		if core != (group == "") {
			continue
		}
		var resources []any
		for _, r := range list {
			resources = append(resources, map[string]any{"resource": r.resource, "scope": r.scope, "responseKind": map[string]any{"kind": r.kind}})
		}
		items = append(items, map[string]any{"metadata": map[string]any{"name": group}, "versions": []any{map[string]any{"version": version, "resources": resources}}})
	}
	return map[string]any{"kind": "APIGroupDiscoveryList", "items": items}
}

// put keeps an object of the listed kinds.
func (k *kubernetesAPI) put(o kubeclient.Object) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.objects[o.Kind()+"/"+o.Name()] = o
}

func (k *kubernetesAPI) remove(kind, name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.objects, kind+"/"+name)
}

func (k *kubernetesAPI) fail(path string, how func(http.ResponseWriter)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fails[path] = how
}

func (k *kubernetesAPI) lose(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.missing[name] = true
}

func (k *kubernetesAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if how := k.fails[r.URL.Path]; how != nil {
		how(w)
		return
	}
	name := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	switch {
	case r.URL.Path == "/readyz":
		fmt.Fprint(w, "ok")
	case r.URL.Path == "/api" || r.URL.Path == "/apis":
		reply(w, http.StatusOK, k.discovery(r.URL.Path == "/api"))
	case listed[name] != "":
		kind := listed[name]
		var items []any
		for id, o := range k.objects {
			if strings.HasPrefix(id, kind+"/") {
				items = append(items, map[string]any(o))
			}
		}
		reply(w, http.StatusOK, map[string]any{"kind": kind + "List", "items": items})
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/"):
		o, ok := k.objects["Node/"+name]
		if !ok {
			notFound(w, "nodes", name)
			return
		}
		reply(w, http.StatusOK, o)
	case k.missing[name]:
		notFound(w, "things", name)
	default:
		reply(w, http.StatusOK, map[string]any{"metadata": map[string]any{"name": name}})
	}
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // the client may have gone
}

func notFound(w http.ResponseWriter, resource, name string) {
	reply(w, http.StatusNotFound, map[string]any{"kind": "Status", "status": "Failure", "reason": "NotFound", "message": fmt.Sprintf("%s %q not found", resource, name), "code": 404})
}

// What the kubelet says of a container. The fields are those of core/v1.
const (
	running = `{"name":"%[1]s","ready":true,"restartCount":0,"image":"i","state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}`
	crashed = `{"name":"%[1]s","ready":false,"restartCount":5,"image":"i",
		"state":{"waiting":{"reason":"CrashLoopBackOff","message":"back-off 2m40s restarting failed container=%[1]s pod=%[1]s-n1_kube-system(0)"}},
		"lastState":{"terminated":{"exitCode":1,"reason":"Error","finishedAt":"2026-01-01T00:00:00Z"}}}`
	unpulled = `{"name":"%[1]s","ready":false,"restartCount":0,"image":"i","state":{"waiting":{"reason":"ImagePullBackOff",
		"message":"Back-off pulling image \"registry.k8s.io/%[1]s:v0.0.0\": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack image \"registry.k8s.io/%[1]s:v0.0.0\": ` +
		`failed to resolve image: registry.k8s.io/%[1]s:v0.0.0: not found"}}}`
)

// staticPod is one of the control plane's as the kubelet lists it.
func staticPod(program, container string) string {
	ready := "False"
	if container == running {
		ready = "True"
	}
	return fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"%[1]s-n1","namespace":"kube-system","labels":{"k8s-app":"%[1]s","tier":"control-plane"},
		"annotations":{"kubernetes.io/config.source":"file"}},"status":{"phase":"Running","startTime":"2026-01-01T00:00:00Z",
		"conditions":[{"type":"Ready","status":%[2]q}],"containerStatuses":[%[3]s]}}`, program, ready, fmt.Sprintf(container, program))
}

func podList(pods ...string) string {
	return `{"kind":"PodList","apiVersion":"v1","items":[` + strings.Join(pods, ",") + `]}`
}
