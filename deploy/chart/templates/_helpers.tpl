{{- /* A name of so many characters at most: list NAME MOST. The hash tells apart names that begin alike. */ -}}
{{- define "headrace.cut" -}}
{{- $name := index . 0 -}}
{{- $most := index . 1 | int -}}
{{- if gt (len $name) $most -}}
{{ $name | trunc (sub $most 9 | int) | trimSuffix "-" }}-{{ $name | sha256sum | trunc 8 }}
{{- else -}}
{{ $name }}
{{- end -}}
{{- end }}

{{- /* A name of Services: without dots, and with room for the longest suffix. */ -}}
{{- define "headrace.name" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- include "headrace.cut" (list ($full | replace "." "-") 50) -}}
{{- end }}

{{- /* Texts from users go through toYaml, which quotes those that YAML takes for others: 2024, on. */ -}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | toYaml }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}

{{- define "headrace.activatorSelector" -}}
app.kubernetes.io/name: {{ include "headrace.cut" (list (.Values.nameOverride | default .Chart.Name) 53) }}-activator
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "headrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ include "headrace.name" . }}{{ else }}{{ .Values.serviceAccount.name | default "default" | toYaml }}{{ end -}}
{{- end }}

{{- define "headrace.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- /* A number or switch as the server reads it: no exponents. */ -}}
{{- define "headrace.text" -}}
{{- if kindIs "float64" . }}{{ if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{- /* The bytes of a Kubernetes quantity, times a percentage: list QUANTITY PERCENT. */ -}}
{{- define "headrace.bytes" -}}
{{- $quantity := index . 0 | toString -}}
{{- $units := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9.]+" $quantity -}}
{{- $unit := trimPrefix $number $quantity -}}
{{- if not (hasKey $units $unit) }}{{ fail (printf "%s: expected a number of bytes with k, M, G, T, Ki, Mi, Gi or Ti" $quantity) }}{{ end -}}
{{- divf (mulf (float64 $number) (get $units $unit) (index . 1)) 100.0 | floor | int64 -}}
{{- end }}

{{- /* Variables of the server by name: options of the chart's values, and `settings`. */ -}}
{{- define "headrace.settings" -}}
{{- $v := .Values -}}
{{- $own := dict
      "shutdown-delay-secs" $v.drain.delaySeconds
      "exit-timeout-secs" $v.drain.exitSeconds
      "exit-on-error" false
      "strict-readiness" $v.probes.strictReadiness -}}
{{- if ne $v.models.controlMode "none" }}{{ $_ := set $own "model-control-mode" $v.models.controlMode }}{{ end -}}
{{- if or $v.environments.size $v.environments.claim -}}
{{- $_ := set $own "environment-cache" "/cache" -}}
{{- if $v.environments.size }}{{ $_ := set $own "environment-cache-bytes" (include "headrace.bytes" (list $v.environments.size 75.0)) }}{{ end -}}
{{- end -}}
{{- if or $v.storeCache.size $v.storeCache.claim -}}
{{- $_ := set $own "store-cache" "/stores" -}}
{{- if $v.storeCache.size }}{{ $_ := set $own "store-cache-bytes" (include "headrace.bytes" (list $v.storeCache.size 75.0)) }}{{ end -}}
{{- end -}}
{{- if $v.signatures.secret }}{{ $_ := set $own "require-signature" "/etc/headrace/signatures/keys.pem" }}{{ end -}}
{{- if $v.access.secret }}{{ $_ := set $own "access" (printf "/etc/headrace/access/%s" $v.access.key) }}{{ end -}}
{{- if $v.tls.secret -}}
{{- range $door := list "http" "grpc" -}}
{{- $_ := set $own (printf "%s-use-ssl" $door) true -}}
{{- $_ := set $own (printf "%s-server-cert" $door) "/etc/headrace/tls/tls.crt" -}}
{{- $_ := set $own (printf "%s-server-key" $door) "/etc/headrace/tls/tls.key" -}}
{{- if $v.tls.clientCertificates }}{{ $_ := set $own (printf "%s-root-cert" $door) "/etc/headrace/tls/ca.crt" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with $v.account.memoryPercent -}}
{{- $_ := set $own "max-admitted-bytes" (include "headrace.bytes" (list $v.resources.limits.memory (float64 .))) -}}
{{- end -}}
{{- range $name, $value := $v.settings -}}
{{- if hasKey $own $name }}{{ fail (printf "settings: %s is what other values of the chart say" $name) }}{{ end -}}
{{- if has $name (list "model-repository" "http-port" "grpc-port" "metrics-port") }}{{ fail (printf "settings: %s cannot be changed in the chart" $name) }}{{ end -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- toYaml $own -}}
{{- end }}

{{- define "headrace.env" -}}
{{- range $name, $value := include "headrace.settings" . | fromYaml }}
- name: HEADRACE_{{ $name | upper | replace "-" "_" }}
  value: {{ include "headrace.text" $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{- define "headrace.repositories" -}}
{{- $further := .Values.models.repositories | default list -}}
{{- $all := $further -}}
{{- if .Values.models.claim }}{{ $all = prepend $all "/models" }}{{ end -}}
{{- if not $all }}{{ fail "models: expected a claim or repositories" }}{{ end -}}
{{- if and (regexMatch "(^|,)[a-z0-9]+:" (join "," $further)) (not (or .Values.storeCache.size .Values.storeCache.claim)) }}{{ fail "models.repositories: stores need storeCache.size or storeCache.claim" }}{{ end -}}
{{- toYaml $all -}}
{{- end }}

{{- define "headrace.mounts" -}}
{{- with .Values -}}
{{- if .models.claim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if or .environments.size .environments.claim }}
- name: environments
  mountPath: /cache
{{- end }}
{{- if or .storeCache.size .storeCache.claim }}
- name: stores
  mountPath: /stores
{{- end }}
{{- if .signatures.secret }}
- name: signatures
  mountPath: /etc/headrace/signatures
  readOnly: true
{{- end }}
{{- if .scratch.size }}
- name: scratch
  mountPath: /tmp
{{- end }}
{{- if .access.secret }}
- name: access
  mountPath: /etc/headrace/access
  readOnly: true
{{- end }}
{{- if .tls.secret }}
- name: tls
  mountPath: /etc/headrace/tls
  readOnly: true
{{- end }}
{{- if .credentials.files }}
- name: credentials
  mountPath: /etc/headrace/credentials
  readOnly: true
{{- end }}
{{- with .extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.probe" -}}
httpGet:
  path: {{ index . 1 }}
  port: http
{{- if (index . 0).Values.tls.secret }}
  scheme: HTTPS
{{- end }}
{{- end }}
