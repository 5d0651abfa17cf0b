package controlplane

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
)

// A default gives way to an argument beside which the program doesn't start.
func TestDefaultsGiveWay(t *testing.T) {
	t.Parallel()
	cluster := testConfig(t).Cluster
	for _, tc := range []struct {
		program    string
		args       config.Args
		with, lack []string
	}{
		{apiServer, nil, []string{"authorization-mode=Node,RBAC", "authentication-config=/files/kube-apiserver/authentication.yaml"}, nil},
		{apiServer, config.Args{"authorization-config": {"/a"}}, []string{"authorization-config=/a"}, []string{"authorization-mode"}},
		{apiServer, config.Args{"authorization-config": {""}}, []string{"authorization-mode=Node,RBAC"}, nil},
		{apiServer, config.Args{"authorization-webhook-config-file": {"/a"}}, []string{"authorization-mode=Node,RBAC,Webhook"}, nil},
		{apiServer, config.Args{"authorization-policy-file": {"/a"}, "authorization-mode": {"ABAC"}}, []string{"authorization-mode=ABAC"}, nil},
		{apiServer, config.Args{"oidc-issuer-url": {"https://a"}, "oidc-client-id": {"b"}}, []string{"authentication-config=/files/kube-apiserver/authentication.yaml"}, []string{"oidc-"}},
		{apiServer, config.Args{"anonymous-auth": {"false"}}, []string{"authentication-config=/files/kube-apiserver/authentication.yaml"}, []string{"anonymous-auth"}},
		{apiServer, config.Args{"authentication-config": {"/a"}, "anonymous-auth": {"true"}}, []string{"authentication-config=/a", "anonymous-auth=true"}, nil},
		{apiServer, config.Args{"authentication-config": {""}}, []string{"authentication-config=/files/kube-apiserver/authentication.yaml"}, nil},
		{apiServer, config.Args{"service-account-signing-endpoint": {"/a"}}, nil, []string{"service-account-key-file", "service-account-signing-key-file"}},
		{apiServer, config.Args{"admission-control": {"NodeRestriction"}}, nil, []string{"enable-admission-plugins"}},
		{apiServer, config.Args{"disable-admission-plugins": {"PodSecurity", "NodeRestriction"}}, []string{"disable-admission-plugins=PodSecurity"}, []string{"enable-admission-plugins"}},
		{apiServer, config.Args{"disable-admission-plugins": {"PodSecurity"}}, []string{"enable-admission-plugins=NodeRestriction"}, nil},
		{apiServer, config.Args{"service-account-issuer": {"b", "a"}}, []string{"service-account-issuer=b", "service-account-issuer=a"}, nil},
		{controllerManager, nil, []string{"cluster-signing-cert-file=", "cluster-signing-key-file="}, []string{"cluster-signing-legacy"}},
		{controllerManager, config.Args{"cluster-signing-kubelet-serving-cert-file": {"/a"}, "cluster-signing-kubelet-serving-key-file": {"/b"}},
			[]string{"cluster-signing-kubelet-serving-cert-file=/a", "cluster-signing-kubelet-client-cert-file=/s/kube-controller-manager/ca.crt", "cluster-signing-kube-apiserver-client-key-file="},
			[]string{"cluster-signing-cert-file", "cluster-signing-key-file"}},
		{controllerManager, config.Args{"cluster-signing-cert-file": {"/a"}, "cluster-signing-key-file": {"/b"}}, []string{"cluster-signing-cert-file=/a"}, []string{"cluster-signing-legacy"}},
		{scheduler, config.Args{"config": {"/a"}}, []string{"config=/a", "leader-elect=true"}, nil},
	} {
		cluster.APIServer.ExtraArgs, cluster.ControllerManager.ExtraArgs, cluster.Scheduler.ExtraArgs = tc.args, tc.args, tc.args
		pod, err := staticPod(podInput{program: tc.program, cluster: &cluster, address: testAddress, secretsDir: "/s", filesDir: "/files"})
		put(t, err)
		command := pod.List("spec", "containers")[0]["command"].(list)
		has := func(flag string) bool {
			return slices.ContainsFunc(command, func(arg any) bool { return strings.HasPrefix(arg.(string), "--"+flag) })
		}
		for _, flag := range tc.with {
			if !has(flag) {
				t.Errorf("%s with %v lacks --%s: %v", tc.program, tc.args, flag, command)
			}
		}
		for _, flag := range tc.lack {
			if has(flag) {
				t.Errorf("%s with %v has --%s", tc.program, tc.args, flag)
			}
		}
	}
}

// The kubelet asks a program at the port that the arguments give it.
func TestProbesFollowThePort(t *testing.T) {
	t.Parallel()
	cluster := testConfig(t).Cluster
	for own, port := range map[string]int{"": 10259, "11259": 11259} {
		cluster.Scheduler.ExtraArgs = config.Args{"secure-port": {own}}
		pod, err := staticPod(podInput{program: scheduler, cluster: &cluster, address: testAddress})
		put(t, err)
		if got := pod.List("spec", "containers")[0].At("livenessProbe", "httpGet", "port"); got != port {
			t.Errorf("%q: %v, want %d", own, got, port)
		}
	}
}

// What the arguments say about who somebody is gets into the node's own AuthenticationConfiguration.
func TestAuthenticationConfiguration(t *testing.T) {
	t.Parallel()
	ca := filepath.Join(t.TempDir(), "ca.crt")
	put(t, os.WriteFile(ca, []byte("PEM\n"), 0o600))
	const anonymous = "map[conditions:[map[path:/livez] map[path:/readyz] map[path:/healthz]] enabled:true]"
	issuer := func(more config.Args) config.Args {
		args := config.Args{"oidc-issuer-url": {"https://a.example"}, "oidc-client-id": {"k"}}
		for flag, values := range more {
			args[flag] = values
		}
		return args
	}
	jwt := func(issuer, mappings string) string {
		return "[map[claimMappings:map[" + mappings + "] issuer:map[audiences:[k]" + issuer + " url:https://a.example]]]"
	}
	for name, tc := range map[string]struct {
		args           config.Args
		anonymous, jwt string
	}{
		"default": {nil, anonymous, "<nil>"},
		"nobody":  {config.Args{"anonymous-auth": {"false"}}, anonymous, "<nil>"},
		"all":     {config.Args{"anonymous-auth": {"TRUE"}}, "map[enabled:true]", "<nil>"},
		"issuer":  {issuer(nil), anonymous, jwt("", "username:map[claim:sub prefix:https://a.example#]")},
		"email":   {issuer(config.Args{"oidc-username-claim": {"email"}}), anonymous, jwt("", "username:map[claim:email prefix:]")},
		"bare":    {issuer(config.Args{"oidc-username-prefix": {"-"}}), anonymous, jwt("", "username:map[claim:sub prefix:]")},
		"groups": {issuer(config.Args{"oidc-username-prefix": {"u:"}, "oidc-groups-claim": {"g"}, "oidc-groups-prefix": {"g:"}, "anonymous-auth": {"true"}}), "map[enabled:true]",
			jwt("", "groups:map[claim:g prefix:g:] username:map[claim:sub prefix:u:]")},
		"authority": {issuer(config.Args{"oidc-ca-file": {"/pki/ca.crt"}}), anonymous, jwt(" certificateAuthority:PEM\n", "username:map[claim:sub prefix:https://a.example#]")},
		"claims": {issuer(config.Args{"oidc-required-claim": {"a=b=c", "d="}, "oidc-username-prefix": {"-"}}), anonymous,
			"[map[claimMappings:map[username:map[claim:sub prefix:]] claimValidationRules:[map[claim:a requiredValue:b=c] map[claim:d requiredValue:]] issuer:map[audiences:[k] url:https://a.example]]]"},
	} {
		files, err := apiServerFiles(&config.APIServer{ExtraArgs: tc.args, ExtraVolumes: []config.Volume{{HostPath: filepath.Dir(ca), MountPath: "/pki"}}})
		put(t, err)
		var got map[string]any
		put(t, yaml.Unmarshal(files[authenticationFile], &got))
		if fmt.Sprint(got["anonymous"]) != tc.anonymous || fmt.Sprint(got["jwt"]) != tc.jwt {
			t.Errorf("%s:\n%v\n%v", name, got["anonymous"], got["jwt"])
		}
	}
}

// Without the certificates of its issuer, the API server runs, and accepts none of its tokens.
func TestIssuerWithoutAuthority(t *testing.T) {
	t.Parallel()
	cluster := testConfig(t).Cluster
	cluster.APIServer.ExtraArgs = config.Args{"oidc-issuer-url": {"https://a.example"}, "oidc-client-id": {"k"}, "oidc-ca-file": {filepath.Join(t.TempDir(), "none")}}
	pod, err := staticPod(podInput{program: apiServer, cluster: &cluster, address: testAddress})
	if pod == nil || err == nil || !strings.Contains(err.Error(), "oidc-ca-file of cluster.apiServer.extraArgs") {
		t.Errorf("pod %v, error %v", pod != nil, err)
	}
}
