package config

import (
	"path"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// The table can be read, and has nothing that means nothing.
func TestArgumentRules(t *testing.T) {
	t.Parallel()
	var any struct {
		Excludes map[string][]string
		Rules    []argumentRule
	}
	d := yaml.NewDecoder(strings.NewReader(string(argumentsText)))
	d.KnownFields(true)
	if err := d.Decode(&any); err != nil {
		t.Fatal(err)
	}
	for _, others := range any.Excludes {
		for _, other := range others {
			if _, err := path.Match(other, ""); err != nil {
				t.Error(err)
			}
		}
	}
	for _, rule := range any.Rules {
		if rule.Flag.Regexp == nil || (rule.Problem == "") == (rule.Advice == "") {
			t.Errorf("%+v", rule)
		}
	}
}

// Arguments that contradict each other, or with which the node doesn't reach a program, are problems. What works,
// but maybe not as intended, is a warning.
func TestArgumentsTogether(t *testing.T) {
	t.Parallel()
	const issuer = "oidc-issuer-url: 'https://a.example', oidc-client-id: k"
	for _, tc := range []struct{ program, args, problem, warning string }{
		{"apiServer", issuer + ", oidc-username-claim: email, oidc-required-claim: [a=b, c=d]", "", ""},
		{"apiServer", issuer + ", authentication-config: /dev/a", "extraArgs.oidc-client-id: the program doesn't start with it beside authentication-config; remove one of them", ""},
		{"apiServer", "oidc-issuer-url: 'https://a.example'", "extraArgs.oidc-issuer-url: needs oidc-client-id", ""},
		{"apiServer", "oidc_issuer_url: 'https://a.example'", "extraArgs.oidc-issuer-url: needs oidc-client-id", ""},
		{"apiServer", "bind_address: 10.0.0.2", "bind-address: the node reaches the program at 127.0.0.1", ""},
		{"scheduler", "v: 1, log_dir: a, log-dir: b", "is the same flag as log-dir; keep only one of them", ""},
		{"apiServer", "oidc-groups-claim: a", "extraArgs.oidc-groups-claim: needs oidc-issuer-url", ""},
		{"apiServer", "oidc-issuer-url: 'http://a.example', oidc-client-id: k", "extraArgs.oidc-issuer-url: is not a URL with https", ""},
		{"apiServer", issuer + ", oidc-required-claim: a", "oidc-required-claim: is not a claim", ""},
		{"apiServer", issuer + ", oidc-signing-algs: ES256", "", "oidc-signing-algs: has no effect"},
		{"apiServer", issuer + ", oidc-ca-file: /a", "", `oidc-ca-file: no entry of extraVolumes has /a in the pod`},
		{"apiServer", "authorization-config: /dev/a, authorization-mode: ''", "authorization-mode: the program doesn't start with it beside authorization-config", ""},
		{"apiServer", "authorization-config: /dev/a, authorization-webhook-version: v1", "authorization-webhook-version: the program doesn't", ""},
		{"apiServer", "authorization-mode: 'Node,RBAC', authorization-webhook-config-file: /dev/a", "authorization-mode: lacks Webhook", ""},
		{"apiServer", "authorization-mode: 'Node,RBAC,Webhook', authorization-webhook-config-file: /dev/a", "", ""},
		{"apiServer", "anonymous-auth: false", "", "anonymous-auth: /livez, /readyz and /healthz answer without a name"},
		{"apiServer", "anonymous-auth: false, authentication-config: /dev/a", "anonymous-auth: the node asks /livez and /readyz without a name", ""},
		{"apiServer", "enable-admission-plugins: [NodeRestriction, PodNodeSelector]", "", ""},
		{"apiServer", "enable-admission-plugins: PodNodeSelector", "", "it replaces NodeRestriction"},
		{"apiServer", "service-account-signing-endpoint: /dev/a, service-account-key-file: /dev/b", "service-account-signing-endpoint: the program doesn't start with it beside service-account-key-file", ""},
		{"apiServer", "tls-cert-file: /dev/a", "tls-cert-file: needs its counterpart", ""},
		{"apiServer", "bind-address: 10.0.0.2", "bind-address: the node reaches the program at 127.0.0.1", ""},
		{"apiServer", "secure-port: 7443", "", "set that instead"},
		{"apiServer", "etcd-prefix: /mine, audit-log-path: /var/log/audit/kube/mine.log", "", ""},
		{"apiServer", "audit-log-path: /logs/a.log", "", `audit-log-path: no entry of extraVolumes has /logs/a.log`},
		{"controllerManager", "cluster-signing-cert-file: /dev/a, cluster-signing-key-file: /dev/b, cluster-signing-kubelet-client-cert-file: /dev/c, cluster-signing-kubelet-client-key-file: /dev/d",
			"cluster-signing-kubelet-client-cert-file: the program doesn't start with it beside cluster-signing-cert-file", ""},
		{"controllerManager", "bind-address: 0.0.0.0", "", ""},
		{"scheduler", "config: /dev/a", "", "clientConnection.kubeconfig must be"},
		{"scheduler", "leader-elect: false", "", "with several control planes each of them would act"},
		{"etcd", "config-file: /a", "etcd reads nothing but this file", ""},
		{"etcd", "discovery-srv: example.org", "a second way to find its members", ""},
		{"etcd", "data-dir: /data", "the data would be in the container", ""},
		{"etcd", "listen-client-urls: 'https://10.0.0.2:2379'", "lacks https://127.0.0.1:2379", ""},
		{"etcd", "listen-client-urls: 'https://10.0.0.2:2379,https://127.0.0.1:2379', quota-backend-bytes: 1", "etcd.ca.crt: is missing", ""},
		{"etcd", "listen-metrics-urls: ['http://10.0.0.2:2381']", "lacks http://127.0.0.1:2381", ""},
		{"kubelet", "register-node: 'false'", "the kubelet registers no Node", ""},
		{"kubelet", "register-node: 'true', container-runtime-endpoint: 'unix:///run/containerd/containerd.sock'", "", ""},
		{"kubelet", "container-runtime-endpoint: 'unix:///run/crio/crio.sock'", "the only runtime here", ""},
		{"kubelet", "hostname-override: a", "", "set machine.network.hostname instead"},
		{"proxy", "config: /a", "kube-proxy reads nothing but this file", ""},
		{"proxy", "cleanup: true", "removes its rules", ""},
		{"proxy", "cleanup: false", "", ""},
	} {
		in := "cluster"
		if tc.program == "kubelet" {
			in = "machine"
		}
		doc := with(without(document(t, ControlPlane), in, tc.program), in, tc.program+": {extraArgs: {"+tc.args+"}}")
		_, warnings, problems := load(t, doc)
		if tc.problem != "" {
			if !strings.Contains(strings.Join(problems, "\n"), tc.problem) {
				t.Errorf("%s: %q, want the problem %q", tc.args, problems, tc.problem)
			}
			continue
		}
		if said := strings.Join(warnings, "\n"); len(problems) > 0 || tc.warning == "" && said != "" || !strings.Contains(said, tc.warning) {
			t.Errorf("%s: problems %q, warnings %q, want %q", tc.args, problems, said, tc.warning)
		}
	}
}

// A file is in the pod if a volume has it, or a folder above it.
func TestMountedFile(t *testing.T) {
	t.Parallel()
	volumes := []Volume{{HostPath: "/var/lib/authz", MountPath: "/authz"}, {HostPath: "/var/ca.crt", MountPath: "/pki/ca.crt"}}
	for name, want := range map[string]string{"/authz/config.yaml": "/var/lib/authz/config.yaml", "/pki/ca.crt": "/var/ca.crt", "/authz2/a": "", "/pki/other": ""} {
		if host, mounted := HostPath(volumes, name); mounted != (want != "") || mounted && host != want {
			t.Errorf("%s: %q", name, host)
		}
	}
}
