package api

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	contract "github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"gopkg.in/yaml.v3"
)

// own is a nodeService of this machine.
func own() *nodeService { return newNodeService(Options{}) }

func TestProcessesHaveOurselves(t *testing.T) {
	t.Parallel()
	res, err := own().Processes(t.Context(), connect.NewRequest(&apiv1.ProcessesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	self := slices.IndexFunc(res.Msg.GetProcesses(), func(p *apiv1.Process) bool { return int(p.GetPid()) == os.Getpid() })
	if self < 0 {
		t.Fatalf("not among %d processes", len(res.Msg.GetProcesses()))
	}
	p := res.Msg.GetProcesses()[self]
	if int(p.GetPpid()) != os.Getppid() || p.GetResidentMemory() < 1<<20 || p.GetThreads() == 0 || !strings.Contains(p.GetArgs(), filepath.Base(os.Args[0])) {
		t.Errorf("%v", p)
	}
}

// The arguments of a pod's program may have values of Secrets: nobody sees them.
func TestArgumentsOfPodsAreHidden(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for pid, group := range map[string]string{"7": "/system/containerd", "8": "/kubepods/besteffort/pod1/2", "9": "/../../kubepods/pod1/2"} {
		dir := filepath.Join(root, "proc", pid)
		stat, err := os.ReadFile("/proc/self/stat")
		must(t, errors.Join(err, os.MkdirAll(dir, 0o700)))
		_, rest, _ := strings.Cut(string(stat), " ")
		must(t, errors.Join(os.WriteFile(filepath.Join(dir, "stat"), []byte(pid+" "+rest), 0o600), os.WriteFile(filepath.Join(dir, "cmdline"), []byte("redis\x00hush\x00"), 0o600),
			os.WriteFile(filepath.Join(dir, "cgroup"), []byte("1:cpu:"+group+"\n"), 0o600)))
	}
	s := own()
	s.root = root
	res, err := s.Processes(t.Context(), connect.NewRequest(&apiv1.ProcessesRequest{}))
	must(t, err)
	var all []string
	for _, p := range res.Msg.GetProcesses() {
		all = append(all, p.GetArgs())
	}
	if !slices.Equal(all, []string{"redis hush", "", ""}) {
		t.Errorf("%q", all)
	}
}

func TestMemoryIsInBytes(t *testing.T) {
	t.Parallel()
	res, err := own().Memory(t.Context(), connect.NewRequest(&apiv1.MemoryRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	total, free := res.Msg.GetMeminfo()["MemTotal"], res.Msg.GetMeminfo()["MemAvailable"]
	if total < 64<<20 || free == 0 || free > total || res.Msg.GetPid1Pss() < 1<<20 {
		t.Errorf("total %d, available %d, own %d", total, free, res.Msg.GetPid1Pss())
	}
}

func TestMountsHaveTheRoot(t *testing.T) {
	t.Parallel()
	s := own()
	res, err := s.Mounts(t.Context(), connect.NewRequest(&apiv1.MountsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	root := slices.IndexFunc(res.Msg.GetMounts(), func(m *apiv1.Mount) bool { return m.GetTarget() == "/" })
	if root < 0 || res.Msg.GetMounts()[root].GetSize() == 0 {
		t.Errorf("mounts: %v", res.Msg.GetMounts())
	}
	// One that hangs isn't asked again, and isn't waited for.
	s.hanging.Store("/", true)
	if _, ok := s.space(t.Context(), "/"); ok {
		t.Error("a file system that hangs was asked again")
	}
}

func TestNetstatFindsAListener(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, only := range []bool{false, true} {
		res, err := own().Netstat(t.Context(), connect.NewRequest(&apiv1.NetstatRequest{ListeningOnly: only}))
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, s := range res.Msg.GetSockets() {
			if only && s.GetProtocol() == "tcp" && s.GetState() != tcpListen {
				t.Errorf("not listening: %v", s)
			}
			if s.GetLocal() == l.Addr().String() && s.GetState() == tcpListen {
				found = true
				if int(s.GetPid()) != os.Getpid() || s.GetRemote() != "0.0.0.0:*" {
					t.Errorf("%v", s)
				}
			}
		}
		if !found {
			t.Errorf("listening only %v: %s isn't there", only, l.Addr())
		}
	}
}

// S-252: a pod, then its containers.
func TestS252Containers(t *testing.T) {
	t.Parallel()
	pod := map[string]string{containerd.LabelPodNamespace: "kube-system", containerd.LabelPod: "kube-apiserver-n1", containerd.LabelPodUID: "u1"}
	sandbox := map[string]string{containerd.LabelKind: containerd.KindSandbox}
	inside := map[string]string{containerd.LabelKind: "container", containerd.LabelContainer: "kube-apiserver"}
	for k, v := range pod {
		sandbox[k], inside[k] = v, v
	}
	for _, tt := range []struct {
		labels  map[string]string
		running bool
		id      string
		status  string
		inPod   bool
	}{
		{sandbox, true, "kube-system/kube-apiserver-n1", "SANDBOX_READY", false},
		{sandbox, false, "kube-system/kube-apiserver-n1", "SANDBOX_NOTREADY", false},
		{inside, true, "kube-system/kube-apiserver-n1:kube-apiserver", "CONTAINER_RUNNING", true},
		{inside, false, "kube-system/kube-apiserver-n1:kube-apiserver", "CONTAINER_EXITED", true},
		{nil, true, "etcd", "CONTAINER_RUNNING", false},
	} {
		c := describeContainer(containerd.PodNamespace, "etcd", "image", tt.labels, tt.running, 42)
		if c.msg.GetId() != tt.id || c.msg.GetStatus() != tt.status || c.msg.GetInPod() != tt.inPod || (c.msg.GetPid() == 42) != tt.running {
			t.Errorf("%v, running %v: %v", tt.labels, tt.running, c.msg)
		}
	}
}

func TestDisksHaveAllThatIsKnown(t *testing.T) {
	t.Parallel()
	s := newNodeService(Options{Disks: func() ([]disk.Disk, error) {
		return []disk.Disk{{Identity: disk.Identity{Path: "/dev/sda", Size: 1 << 40, Model: "BIG", Serial: "s1", WWID: "naa.1"}, Bus: "sata", ReadOnly: true, System: true, Holds: "Garboard", BusPath: "/pci0", Type: config.DiskHDD}}, nil
	}})
	res, err := s.Disks(t.Context(), nil)
	must(t, err)
	want := &apiv1.DisksResponse{Disks: []*apiv1.Disk{{
		Device: "/dev/sda", Size: 1 << 40, Model: "BIG", Serial: "s1", Bus: "sata", ReadOnly: true, System: true, Content: "Garboard",
		Wwid: "naa.1", BusPath: "/pci0", Type: "hdd",
	}}}
	if !proto.Equal(res.Msg, want) {
		t.Errorf("got %v\nwant %v", res.Msg, want)
	}
}

// Who asks for nothing gets the first administrator's access, and who names a person, that
// person's: for a day, in a group whose rights a binding can take back. The log says which.
func TestKubeconfig(t *testing.T) {
	r := newRig(t)
	cfg, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443"})
	must(t, err)
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, cfg))
	r.serve()
	client := garboardv1connect.NewAccessServiceClient(r.as(admin), host)
	for _, tc := range []struct {
		what   string
		asked  *apiv1.KubeconfigRequest
		user   string
		groups []string
		lasts  time.Duration
		log    string
	}{
		{"nothing", &apiv1.KubeconfigRequest{}, "admin", []string{"system:masters"}, 365 * 24 * time.Hour, "outcome=ok"},
		{"for an hour", &apiv1.KubeconfigRequest{Ttl: durationpb.New(time.Hour)}, "admin", []string{"system:masters"}, time.Hour, "ttl 1h0m0s"},
		{"a person", &apiv1.KubeconfigRequest{User: "jo"}, "jo", []string{"garboard:administrators"}, 24 * time.Hour, `user \"jo\"`},
		{"a group", &apiv1.KubeconfigRequest{Groups: []string{"viewers"}}, "admin", []string{"viewers"}, 24 * time.Hour, `groups \"viewers\"`},
	} {
		got, err := ask(t, client.Kubeconfig, tc.asked)
		must(t, err)
		wantParts(t, r.audited(), "AccessService/Kubeconfig peer=jane", tc.log)
		var file config.Kubeconfig
		must(t, yaml.Unmarshal(got.Kubeconfig, &file))
		crt, err := base64.StdEncoding.DecodeString(file.Users[0].User.Crt)
		must(t, err)
		cert, err := pki.ParseCert(crt)
		must(t, err)
		if cert.Subject.CommonName != tc.user || !slices.Equal(cert.Subject.Organization, tc.groups) || file.CurrentContext != tc.user+"@test" {
			t.Errorf("%s: %s, context %s", tc.what, cert.Subject, file.CurrentContext)
		}
		if off := time.Until(cert.NotAfter) - tc.lasts; off.Abs() > time.Minute || !cert.NotAfter.Equal(got.Expires.AsTime()) {
			t.Errorf("%s: until %s, and %s is said", tc.what, cert.NotAfter, got.Expires.AsTime())
		}
	}
	for want, asked := range map[string]*apiv1.KubeconfigRequest{
		"from 1m0s to 8760h0m0s": {Ttl: durationpb.New(366 * 24 * time.Hour)},
		"because it can't be":    {User: "jo", Ttl: durationpb.New(-time.Hour)},
	} {
		_, err := ask(t, client.Kubeconfig, asked)
		wantCode(t, err, connect.CodeInvalidArgument, want)
	}
}

// A client gets a certificate for its own key, with its own name and roles, and all authorities
// that nodes may have their certificates from. A worker signs none.
func TestClientCertificate(t *testing.T) {
	r := newRig(t)
	cfg, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443"})
	must(t, err)
	former, err := pki.NewMachineCA(time.Now())
	must(t, err)
	cfg.Machine.AcceptedCAs = []config.CertKey{{Crt: former.Cert, Key: former.Key}}
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, cfg))
	r.serve()
	key, err := pki.NewKey(pki.Ed25519)
	must(t, err)
	request, err := pki.NewRequest(key, pki.Leaf{CN: "somebody else", Orgs: []string{"os:peer"}})
	must(t, err)
	client := garboardv1connect.NewAccessServiceClient(r.as(admin), host)
	got, err := ask(t, client.ClientCertificate, &apiv1.ClientCertificateRequest{Request: request})
	must(t, err)
	cert, err := pki.ParseCert(got.GetCertificate())
	must(t, err)
	authority, err := pki.ParseCert(cfg.Machine.CA.Crt)
	must(t, err)
	if cert.CheckSignatureFrom(authority) != nil || cert.Subject.CommonName != "jane" || !slices.Equal(cert.Subject.Organization, []string{string(contract.Admin)}) {
		t.Errorf("a certificate for %s by %s", cert.Subject, cert.Issuer)
	}
	if _, err := tls.X509KeyPair(got.GetCertificate(), key); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(got.GetAuthorities(), cfg.Machine.TrustedCAs()) {
		t.Errorf("authorities:\n%s", got.GetAuthorities())
	}
	_, err = ask(t, client.ClientCertificate, &apiv1.ClientCertificateRequest{Request: []byte("nonsense")})
	wantCode(t, err, connect.CodeInvalidArgument, "parse certificate request")
	worker := *cfg
	worker.Machine.Type, worker.Machine.CA.Key = config.Worker, nil
	must(t, configuration.Configs.Put(r.opts.Store.As("test"), configuration.ConfigID, &worker))
	_, err = ask(t, client.ClientCertificate, &apiv1.ClientCertificateRequest{Request: request})
	wantCode(t, err, connect.CodeFailedPrecondition, "ask a control plane")
}
